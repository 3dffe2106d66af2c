"""Verify steps against eager PyTorch.

verifier.py      one step: eager first, the emitted step observed, ranks agree
eager.py         one step by eager PyTorch, as if it had not happened
differences.py   loss, gradients, auxiliary results and buffers compared, on this rank, up to noise; all tolerances,
                 those of updates too
update.py        each update compared with the user's own optimizer on a copy, and gradients with the ranks' mean
replicas.py      parameters and the optimizer's state, compared between ranks
"""
