"""Capture a training step as one FX graph, and notice when the step has changed since.

whole_step.py                               the table of contents of a capture: `capture`
step_capture.py                             the first capture of a job, and later ones
training.py, optimizer.py                   the user's own objects, checked
fake_mode.py, fake_mode.py                fake stand-ins for what enters the step
training.py                            a loss that is a sum over counted elements
forward_backward.py, updates.py             trace the loss and its gradients; clipping and the optimizer's updates
whole_step.py                                 one graph of the pieces
forward_backward.py, faithful.py                run the user's Python on traced tensors as eager would
questions.py, questions.py, questions.py       answer what Python asks about values, and ask again before each step
user_collectives.py, faithful.py         keep its collectives; say why it does not trace
batch_type.py, step_capture.py         tensors in the same memory; buffers that ranks share
step_guard.py, step_guard.py           compare what a capture baked in, before each step
batch_type.py, batch_type.py, step_capture.py      the type of a batch; a difference; parameters without gradient
backward_graph.py                         parameters among the inputs of a Dynamo graph
reach/                                      everything that traced Python can read
"""
