"""Verify steps against eager PyTorch.

verifier.py      which steps, and one of them: eager first, the emitted step observed, ranks agree
eager.py         one step by eager PyTorch, as if it had not happened
differences.py   loss, gradients, auxiliary results and buffers compared, on this rank
update.py        each update compared with the user's own optimizer on a copy
means.py         gradients that reach the updates compared with the ranks' mean
compare.py       two tensors up to noise: tolerances
"""
