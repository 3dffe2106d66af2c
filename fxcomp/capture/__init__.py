"""Capture a training step as one FX graph, and notice when the step has changed since.

whole_step.py         `capture`, the table of contents; one graph of the traced pieces
step_capture.py       the first capture of a job, and later ones; buffers that ranks share
training.py           the user's own objects, checked: model, loss, optimizers, the loss's scale
optimizer.py          whose parameters the optimizers update, and which numbers stay live
optimizer_state.py    state that an optimizer has not made yet
probe.py              what an optimizer's step does beside the update
shadow.py             the optimizer's step over other tensors
fake_mode.py          fake stand-ins for what enters the step
forward_backward.py   trace the loss and its gradients
updates.py            trace clipping and each parameter's update
faithful.py           run the user's Python as eager would; say why a step does not trace
questions.py          answer what Python asks about values, and ask again before each step
pythons_numbers.py    let Python treat symbols as its own numbers
random_state.py       keep what Python does with random generators
user_collectives.py   keep the loss function's collectives
structures.py         flatten batches and auxiliary results
batch_type.py         the type of a batch; tensors in the same memory; a difference, in words
step_guard.py         compare what a capture baked in, before each step
backward_graph.py     the backward graph of torch.compile, and its parameters
watch.py              the watched values: the contract of a captured step
untouched.py          undo what tracing left in watched values, and refuse it
"""
