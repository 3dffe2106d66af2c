"""Strategy for a Lightning Trainer: gradients go through fxcomp, and checkpoints keep what is left out.

    trainer = Trainer(strategy=FxcompStrategy(compress="balanced"))

Everything else stays Lightning's: loss scaling, accumulation, clipping, the optimizer, logging, callbacks. Not imported
by `import fxcomp`, because Lightning is optional.
"""

# Lightning is not there where types are checked
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fxcomp.cluster.cluster import Cluster
from fxcomp.errors import BadOption, FxcompError
from fxcomp.frontends.ddp_hook import DdpHook, ddp_hook
from fxcomp.options import GivenCosts
from fxcomp.plan.compress import GivenCompress

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
url_to_fs: Any = importlib.import_module("fsspec.core").url_to_fs
"""Lightning's way to a checkpoint's file, which comes with torch."""

FILE = "{checkpoint}.fxcomp-rank{rank}.pt"
"""Beside each of Lightning's checkpoints: the tensors of `checkpoint()`, a file a rank."""
STEP = "lightning.global_step"
"""Among them: of which step they are."""


class FxcompStrategy(_DDPStrategy):
    """DDPStrategy with fxcomp's hook, on CPUs as well; one process has nothing to average.

    `compress`, `cluster` and `costs` are those of `fxcomp.ddp_hook`; the scaler is Lightning's. Other `options` are
    those of DDPStrategy, as `process_group_backend=` and `find_unused_parameters=`. Raises BadOption for a second hook
    (`ddp_comm_hook=`), and BadPlan, before anything is trained.
    """

    hook: DdpHook | None = None
    """The hook of the training that runs, or ran last."""
    _trained: Any = None
    """The module that it averages gradients of."""
    _begins_at: tuple[str, int | None] | None = None
    """The checkpoint that training goes on from, and its step."""

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
        self._keep(hook)
        self.model.register_comm_hook(self.model, hook)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write Lightning's checkpoint, and this rank's tensors beside it; Lightning calls it on all ranks."""
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if self.hook is None or "loops" not in checkpoint:  # save_weights_only=True
            return
        files = _Files(filepath)
        files.write(self.global_rank, {**self.hook.checkpoint(), STEP: torch.tensor(checkpoint["global_step"])})
        if self.is_global_zero:  # of a job with more ranks, under the same name
            files.remove(self.world_size)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint with what stands beside it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            _Files(filepath).remove()

    def load_checkpoint(self, checkpoint_path: Any, *arguments: Any, **named: Any) -> Any:
        """Read Lightning's checkpoint, and remember where it is."""
        library: Any = super()
        loaded = library.load_checkpoint(checkpoint_path, *arguments, **named)
        if self.lightning_module.trainer.state.fn == "fit":
            self._begins_at = str(checkpoint_path), loaded.get("global_step")
        return loaded

    def _keep(self, hook: DdpHook) -> None:
        """Save the state of a hook from now on, and load the state that training goes on from.

        It is the state beside a checkpoint, or, where `fit` trains the same module again, that of the fit before.
        """
        before, of = self.hook, self._trained
        self.hook, self._trained = hook, self.lightning_module
        if self._begins_at is not None:
            hook.load_state_dict(self._saved_for_here(*self._begins_at))
            self._begins_at = None
        elif before is not None and of is self.lightning_module:
            hook.load_state_dict(_state_of(before))
        if before is not None:
            before.close()

    def _saved_for_here(self, checkpoint: str, step: int | None) -> list[dict[str, Tensor]] | None:
        """Read this rank's part of what was saved, by as many ranks as there were; what is of another step is left."""
        files = _Files(checkpoint, follow=True)
        ranks = sorted(files.of_ranks())
        if not ranks and self.is_global_zero:
            _warn(f"{checkpoint!r} has no state beside it: what compression left out before is lost, once.")
        states: list[dict[str, Tensor]] = []
        for rank in ranks[self.global_rank :: self.world_size]:
            tensors = files.read(rank)
            saved_at = int(tensors.pop(STEP, torch.tensor(step)))
            if saved_at == step:
                states.append(tensors)
                continue
            _warn(
                f"{checkpoint!r} is of step {step}, and rank {rank}'s file beside it of step {saved_at}: a job ended"
                " while it saved. The file is not used, and what compression left out on that rank is lost, once; or"
                " go on from another checkpoint."
            )
        return states or None

    def teardown(self) -> None:
        """Give back process groups."""
        if self.hook is not None:
            self.hook.close()
        super().teardown()


class _Files:
    """The files beside a checkpoint, wherever Lightning can write one: a folder, or what fsspec has a protocol for."""

    def __init__(self, checkpoint: Any, *, follow: bool = False):
        """With `follow`, beside what a local link leads to: `save_last="link"` makes one."""
        self._system, self._place = url_to_fs(str(checkpoint))
        self._is_local = "file" in self._system.protocol
        if follow and self._is_local:
            self._place = os.path.realpath(self._place)

    def write(self, rank: int, tensors: Mapping[str, Tensor]) -> None:
        """Write a rank's file, all of it or nothing."""
        held = io.BytesIO()
        torch.save(dict(tensors), held)
        place = FILE.format(checkpoint=self._place, rank=rank)
        self._system.makedirs(self._place.rpartition("/")[0], exist_ok=True)
        if not self._is_local:  # elsewhere a file is there once it is whole
            self._system.pipe_file(place, held.getvalue())
            return
        unfinished = f"{place}.part"
        self._system.pipe_file(unfinished, held.getvalue())
        os.replace(unfinished, place)

    def read(self, rank: int) -> dict[str, Tensor]:
        with self._system.open(self.of_ranks()[rank], "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)

    def remove(self, first: int = 0) -> None:
        """Remove the files of ranks from the `first` on."""
        for rank, place in self.of_ranks().items():
            if rank >= first:
                with contextlib.suppress(FileNotFoundError):
                    self._system.rm_file(place)

    def of_ranks(self) -> dict[int, str]:
        """List the files by their rank."""
        if "http" in self._system.protocol:  # a page, and no folder
            return {}
        folder, _, name = self._place.rpartition("/")
        pattern = re.escape(FILE.format(checkpoint=name, rank="/")).replace("/", r"(\d+)")
        self._system.invalidate_cache(folder)
        try:
            places: list[str] = self._system.ls(folder, detail=False)
        except FileNotFoundError:
            return {}
        found = {place: re.fullmatch(pattern, place.rpartition("/")[2]) for place in places}
        return {int(match[1]): place for place, match in found.items() if match}


def _state_of(before: DdpHook) -> Mapping[str, Any] | None:
    """Copy the state in which a fit has ended, which the next one begins in."""
    try:
        return before.state_dict()
    except FxcompError as error:
        _warn(f"this fit begins without what compression left out in the one before: {error}")
        return None


def _warn(text: str) -> None:
    warnings.warn(f"fxcomp: {text}", stacklevel=4)
