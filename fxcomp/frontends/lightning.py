"""Strategies for a Lightning Trainer: gradients go through fxcomp, and checkpoints keep what is left out.

    trainer = Trainer(strategy=FxcompStrategy(compress="balanced"))

Everything else stays Lightning's: loss scaling, accumulation, clipping, the optimizer, logging, callbacks. Not imported
by `import fxcomp`, because Lightning is optional.
"""

# Lightning is not there where types are checked
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fxcomp.cluster.cluster import Cluster
from fxcomp.errors import BadOption
from fxcomp.frontends.ddp_hook import DdpHook, ddp_hook
from fxcomp.options import GivenCosts
from fxcomp.plan.compress import GivenCompress
from fxcomp.step.compiled_step import CompiledStep

NAMES = ("lightning.pytorch", "pytorch_lightning")
"""One library under two names, whose classes do not know each other: the one that the script has imported counts."""


def _library() -> Any:
    for name in (*(name for name in NAMES if name in sys.modules), *NAMES):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise ImportError("FxcompStrategy needs lightning.\n  pip install 'fxcomp[lightning]'", name="lightning")


_DDPStrategy: Any = _library().strategies.DDPStrategy

FILE = "{checkpoint}.fxcomp-rank{rank}.pt"
"""Beside each of Lightning's checkpoints: the tensors of `checkpoint()`, a file a rank."""


class _KeepsStates(_DDPStrategy):
    """Saves with each checkpoint, a file a rank, what fxcomp keeps, and reads it where training goes on."""

    kept: DdpHook | CompiledStep | None = None
    """The hook or the step of the training that runs, or ran last."""
    _begins_at: Path | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write Lightning's checkpoint, and this rank's tensors beside it; Lightning calls it on all ranks."""
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if self.kept is None or "loops" not in checkpoint:  # save_weights_only=True
            return
        path = Path(FILE.format(checkpoint=filepath, rank=self.global_rank))
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.kept.checkpoint(), path)
        if self.is_global_zero:  # of a job with more ranks, under the same name
            for rank, old in _beside(Path(filepath)):
                if rank >= self.world_size:
                    old.unlink(missing_ok=True)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint with what stands beside it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            for _, path in _beside(Path(filepath)):
                path.unlink(missing_ok=True)

    def load_checkpoint(self, checkpoint_path: Any, *arguments: Any, **named: Any) -> Any:
        """Read Lightning's checkpoint, and remember where it is."""
        library: Any = super()
        loaded = library.load_checkpoint(checkpoint_path, *arguments, **named)
        if self.lightning_module.trainer.state.fn == "fit":
            self._begins_at = Path(checkpoint_path)
        return loaded

    def keep(self, kept: DdpHook | CompiledStep) -> None:
        """Save the state of this from now on, and load what was saved where training goes on; every rank calls it."""
        if self.kept is not None:
            self.kept.close()
        self.kept = kept
        if self._begins_at is not None:
            kept.load_state_dict(self._saved_for_here(self._begins_at))
            self._begins_at = None

    def _saved_for_here(self, checkpoint: Path) -> list[Any] | None:
        """Read this rank's part of what was saved, by as many ranks as there were."""
        files = [path for _, path in _beside(checkpoint)]
        if not files and self.is_global_zero:
            warnings.warn(
                f"fxcomp: {str(checkpoint)!r} has no state beside it: what compression left out before is lost, once.",
                stacklevel=2,
            )
        mine = files[self.global_rank :: self.world_size]
        return [torch.load(path, map_location="cpu", weights_only=True) for path in mine] or None

    def teardown(self) -> None:
        """Give back process groups."""
        if self.kept is not None:
            self.kept.close()
        super().teardown()


def _beside(checkpoint: Path) -> list[tuple[int, Path]]:
    """List the files beside a checkpoint, by their rank; a link is followed, as `save_last="link"` makes one."""
    checkpoint = checkpoint.resolve()
    start, end = FILE.partition("{rank}")[::2]
    start = start.format(checkpoint=checkpoint.name)
    names = [path for path in checkpoint.parent.glob("*") if path.name.startswith(start) and path.name.endswith(end)]
    numbered = [(path.name.removeprefix(start).removesuffix(end), path) for path in names]
    return sorted((int(number), path) for number, path in numbered if number.isdecimal())


class FxcompStrategy(_KeepsStates):
    """DDPStrategy with fxcomp's hook, on CPUs as well; one process has nothing to average.

    The options are those of `fxcomp.ddp_hook`, but for the scaler, which is Lightning's; others are DDPStrategy's.
    """

    def __init__(
        self,
        *,
        compress: GivenCompress = "balanced",
        cluster: Cluster | None = None,
        costs: GivenCosts | None = None,
        **options: Any,
    ) -> None:
        taken = sorted({"ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper"} & options.keys())
        if taken:
            raise BadOption(
                f"FxcompStrategy registers a hook of its own; {taken[0]}= would be another one.\n"
                "  Leave it out, or use DDPStrategy."
            )
        super().__init__(**options)
        self._options: dict[str, Any] = {"compress": compress, "cluster": cluster, "costs": costs}
        ddp_hook(**self._options)  # raises here, and not in training

    def configure_ddp(self) -> None:
        """Wrap the module as DDPStrategy does, and register the hook."""
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        scaler = getattr(self.precision_plugin, "scaler", None)  # of precision="16-mixed": residuals follow its scale
        hook = ddp_hook(**self._options, scaler=scaler)
        self.keep(hook)
        self.model.register_comm_hook(self.model, hook)


class CompiledStrategy(_KeepsStates):
    """A process a rank, and no wrapper: a compiled step averages gradients.

    The module makes its step in `on_train_start`, hands it over by `trainer.strategy.keep(step)`, sets
    `automatic_optimization = False`, and calls `self.optimizers().step(lambda: step(batch))`. Lightning then counts
    steps; the optimizer's own step finds no gradients.
    """

    def configure_ddp(self) -> None:
        """Leave the module as it is; automatic optimization would train each rank for itself."""
        if dist.get_world_size() > 1 and self.lightning_module.automatic_optimization:
            raise BadOption(
                "under CompiledStrategy nobody averages gradients but a compiled step, and this module optimizes"
                " automatically.\n"
                "  Set self.automatic_optimization = False and call the step yourself, or use FxcompStrategy."
            )
