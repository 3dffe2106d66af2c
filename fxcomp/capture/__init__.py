"""Capture a training step as one FX graph, and detect later changes of the step.

Files:

    whole_step.py         `capture`, start here: joins the traced graphs into one
    step_capture.py       first and later captures, with agreement between ranks
    training.py           checks of model, loss, optimizers and loss scale
    optimizer.py          parameters and hyper-parameters of the optimizers
    optimizer_state.py    optimizer state before the first step
    probe.py              side effects and state of an optimizer's step
    shadow.py             the optimizer's step on other tensors
    fused.py              torch's fused update for an optimizer
    fake_mode.py          fake tensors for the inputs; corrected fakes
    stand_ins.py          traced tensors that replace the model's
    forward_backward.py   trace of the loss and its gradients
    updates.py            trace of clipping and updates
    faithful.py           eager behaviour of torch calls; errors for untraceable steps
    pythons_numbers.py    symbols that behave as Python numbers
    questions.py          Python's branches on values, checked again before each step
    random_state.py       reads and writes of random generators
    user_collectives.py   the loss function's collectives
    structures.py         flattening of batches and auxiliary results
    batch_type.py         type of a batch; tensors in shared memory
    step_guard.py         comparison with the captured state before each step
    backward_graph.py     parameters and gradients of torch.compile's backward graph
    watch.py              watched Python values
    untouched.py          undoes changes made during tracing, or raises
"""
