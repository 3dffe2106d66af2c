"""User-facing errors, one class per remedy.

The text of an error states the problem, its place, and the remedy.
"""


class FxcompError(Exception):
    """Base of all errors that fxcomp raises on purpose."""


# Input of the user


class BadOption(FxcompError, ValueError):
    """Invalid option, argument, cluster, job, cost table or error table."""


class BadStrategy(FxcompError):
    """Strategy text that does not parse, or whose steps are in an impossible order."""


class BadPlan(FxcompError):
    """Unreadable plan file, or plan of another model."""


class BadTensor(FxcompError, ValueError):
    """Tensor or payload with a dtype, size, layout, device or indices that a compressor cannot take."""


class BadState(FxcompError):
    """Saved state of another plan, model or rank."""


class BadCall(FxcompError):
    """Call at the wrong time: before ranks have connected, inside a group of micro-batches, or after `close`."""


# Unsupported by fxcomp: remove it, or use another frontend


class Unsupported(FxcompError):
    """Unsupported model, parameter, batch, result, optimizer, torch mode or machine."""


# Capture: change the step


class CaptureFailed(FxcompError):
    """The training step cannot be captured as one graph equivalent to eager PyTorch."""


class StepChanged(FxcompError):
    """The training step changed in a way that the compiled step does not support."""


# Ranks: make them equal, or restart them


class ReplicasDiffer(FxcompError):
    """Ranks differ in the model, an option, a parameter, or a count of batches."""

    is_everywhere = True
    """True if all ranks raise this error."""


class PeerFailed(FxcompError):
    """Another rank, or a process that fxcomp started, failed or did not arrive in time."""


class LostTouch(PeerFailed):
    """A collective did not end, and no rank reported a cause."""


class RanksApart(FxcompError):
    """Ranks are at different steps, or from different starts of the job."""


# Running


class CannotReplan(FxcompError):
    """Planning again is impossible now, or the plan is fixed."""


class VerificationFailed(FxcompError):
    """The compiled step's loss or gradients differ from eager PyTorch."""
