"""Verify steps against eager PyTorch.

verifier.py      one step: eager first, the emitted step observed, ranks agree
eager.py         one eager step without side effects
differences.py   loss, gradients, auxiliary results and buffers on this rank; all tolerances
update.py        updates against the user's optimizer, and gradients against the ranks' average
replicas.py      parameters and optimizer state between ranks
"""
