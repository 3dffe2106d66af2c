"""Every mistake that a user can make, a class each.

The text of an error says what is wrong, where, and what to do about it.
"""


class FxcompError(Exception):
    """The base of all errors that fxcomp raises on purpose."""


# Clusters, strategies, plans and costs


class BadCluster(FxcompError):
    """A cluster or a link that cannot exist, or does not fit the running process group."""


class BadStrategy(FxcompError):
    """A strategy text that does not parse, or steps that cannot follow each other."""


class BadPlan(FxcompError):
    """A plan file that cannot be read, or a plan made for another model."""


class BadErrorTable(FxcompError, ValueError):
    """An error table that says nothing: of other gradients, or no table at all."""


class BadOption(FxcompError):
    """An option that does not exist or has a value that it cannot have."""


class DivergingCombination(BadOption):
    """Compressor, error feedback and optimizer together diverge by design, or train badly."""


# Compressors


class BadTensor(FxcompError, ValueError):
    """A tensor that a compressor cannot take: its dtype, size, layout or device; or sizes that no segments have."""


class BadPayload(FxcompError):
    """A payload that no rank's compressor made: damaged on the way, or made by another version."""


# Capture


class UnsupportedBatch(FxcompError):
    """A batch that holds something other than plain values and tensors of the kinds that are captured."""


class UnsupportedModel(FxcompError):
    """A model that something else wraps for data-parallel training, on several devices, or of buffers not captured."""


class UnsupportedMode(FxcompError):
    """A mode of torch is on around a step, and would not take part in it."""


class AbsentDevice(FxcompError, RuntimeError):
    """A job asks for more of the GPU that --device names than is imitated on a machine without it."""


class UnsupportedResult(FxcompError):
    """The loss function returns no single number, or beside it what a compiled step could not return again."""


class UnsupportedParameter(FxcompError):
    """A parameter that cannot be handled: its kind, its dtype, or a hook on it."""


class UnsupportedOptimizer(FxcompError):
    """An optimizer, or an option of one, whose step is not captured; or one of parameters that the model lacks."""


class RandomRecomputation(FxcompError):
    """Activation checkpointing would draw other random numbers than the forward pass drew."""


class CaptureFailed(FxcompError):
    """The training step does not trace into one graph."""


class DrawsInPython(CaptureFailed):
    """The step draws random numbers with Python or NumPy, which tracing would freeze."""


class SeedsGenerator(CaptureFailed):
    """The step makes, seeds, reads or sets a random generator in a way that would happen only while tracing."""


class UnsynchronizedGradient(FxcompError):
    """The gradient of a trainable parameter never reaches a collective."""


class StepChanged(FxcompError):
    """Something about the step changed that the compiled step cannot follow."""


# Ranks


class NoProcessGroup(FxcompError):
    """Several ranks are meant, but torch.distributed is not initialised, or is no longer."""


class StoreReused(FxcompError):
    """The store that ranks meet in has answers of an earlier start of the job."""


class ModelsDiffer(FxcompError):
    """Ranks brought different models, optimizers or settings."""


class PeerFailed(FxcompError):
    """Another rank, or one that was started here, failed or did not arrive in time."""


class LostTouch(PeerFailed):
    """A collective did not end, and nobody has said why."""


class RanksApart(FxcompError):
    """Something was raised inside a step on some rank, and the ranks are no longer at the same one."""


# Running


class StepClosed(FxcompError):
    """A compiled step, a hook or the like is used after it was closed."""


class GroupsDiffer(FxcompError):
    """Ranks end a group of micro-batches after different numbers of them."""


class ReplicasDiffer(FxcompError):
    """Something that must be the same on all ranks is not: a learning rate, a parameter, the optimizer's state."""

    is_everywhere = True
    """All ranks raise it at the same line."""


class GroupUnfinished(FxcompError):
    """Something that only the end of a group of micro-batches allows."""


class ScaleNotUpdated(FxcompError):
    """A GradScaler that was not updated after a step, or that unscaled gradients beside it."""


class CannotReplan(FxcompError):
    """There is nothing to plan again by, or the plan is not fxcomp's to change."""


class VerificationFailed(FxcompError):
    """The compiled step computed another loss or gradient than eager PyTorch."""


class BadState(FxcompError):
    """A saved state that belongs to another plan, model or rank."""


class UnsupportedFeature(FxcompError):
    """Something that fxcomp does not do yet, refused rather than done wrongly."""


# Jobs and hosts


class BadLog(FxcompError):
    """A log of a run that cannot be read: a line that is no JSON, or a field that is no number."""


class BadJob(FxcompError):
    """A job file, function or text that does not exist, or a function that does not return a Job."""


class HostsUnavailable(FxcompError):
    """Shaped hosts cannot be made on this machine."""
