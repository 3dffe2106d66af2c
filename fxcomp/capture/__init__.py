"""Capture a training step as one FX graph, and notice when the step has changed since.

whole_step.py         `capture`, the table of contents; one graph of the traced pieces
step_capture.py       what ranks agree on at the first capture: buffers that travel, facts; later captures of a job
training.py           the user's own objects, checked: model, loss, optimizers, the loss's scale
optimizer.py          whose parameters the optimizers update, and which numbers stay live
optimizer_state.py    state that an optimizer has not made yet
probe.py              what an optimizer's step does beside the update
shadow.py             the optimizer's step over other tensors
fused.py              which fused update of torch's an optimizer asks for
fake_mode.py          fake tensors for what enters the step; better fakes of operators; eager's checks of types
stand_ins.py          let traced tensors stand for the model's, wherever Python looks them up
forward_backward.py   trace the loss and its gradients
updates.py            trace clipping and each parameter's update
faithful.py           run the user's calls of torch as eager would (a function mode); say why a step does not trace
pythons_numbers.py    let Python treat symbols as its own numbers: what it reads, compares, writes as text
questions.py          answer what these ask about values, by a prelude that asks again before each step
random_state.py       keep what Python does with random generators
user_collectives.py   keep the loss function's collectives
structures.py         flatten batches and auxiliary results
batch_type.py         the type of a batch; tensors in the same memory; a difference, in words
step_guard.py         compare what a capture baked in, before each step; trace twice what the first call sets up
backward_graph.py     the backward graph of torch.compile, and its parameters
watch.py              the watched values: the contract of a captured step
untouched.py          notice what changed while tracing: undo it, and refuse it
"""
