"""Verify steps against eager PyTorch.

verifier.py      one step: eager first, the emitted step observed, ranks agree
eager.py         one eager step without side effects
differences.py   comparison of loss, gradients, auxiliary results and buffers on this rank; all tolerances
update.py        comparison of updates with the user's optimizer, and of gradients with the ranks' mean
replicas.py      comparison of parameters and optimizer state between ranks
"""
