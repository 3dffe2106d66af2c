"""Kinds of mistakes that a user can make, a class for each way out.

The text of an error says what is wrong, where, and what to do about it.
"""


class FxcompError(Exception):
    """The base of all errors that fxcomp raises on purpose."""


# Given by the user: change it


class BadOption(FxcompError, ValueError):
    """An option, argument, cluster, job, cost or error table that does not exist, or is not one."""


class BadStrategy(FxcompError):
    """A strategy text that does not parse, or steps that cannot follow each other."""


class BadPlan(FxcompError):
    """A plan file that cannot be read, or a plan made for another model."""


class BadTensor(FxcompError, ValueError):
    """A tensor or payload that a compressor cannot take: its dtype, size, layout or device, or its places."""


class BadState(FxcompError):
    """A saved state that belongs to another plan, model or rank."""


class BadCall(FxcompError):
    """A call at the wrong time: before ranks have met, inside a group of micro-batches, or after `close`."""


# Not handled by fxcomp: leave it out, or use another frontend


class Unsupported(FxcompError):
    """A model, parameter, batch, result, optimizer, mode of torch or machine that fxcomp does not handle."""


# Capture: change the step


class CaptureFailed(FxcompError):
    """The training step does not become one graph that computes what eager PyTorch does."""


class StepChanged(FxcompError):
    """Something about the step changed that the compiled step cannot follow."""


# Ranks: make them the same, or start them again


class ReplicasDiffer(FxcompError):
    """Something that must be the same on all ranks is not: the model, an option, a parameter, a count of batches."""

    is_everywhere = True
    """All ranks raise it at the same line."""


class PeerFailed(FxcompError):
    """Another rank, or one that was started here, failed or did not arrive in time."""


class LostTouch(PeerFailed):
    """A collective did not end, and no rank has said why."""


class RanksApart(FxcompError):
    """Ranks are no longer at the same step, or not of the same start of the job."""


# Running


class CannotReplan(FxcompError):
    """There is nothing to plan again by, or the plan is not fxcomp's to change."""


class VerificationFailed(FxcompError):
    """The compiled step computed another loss or gradient than eager PyTorch."""
