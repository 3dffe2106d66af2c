"""Strategy for a Lightning Trainer: average gradients with fxcomp, and keep residuals in checkpoints.

    trainer = Trainer(strategy=FxcompStrategy(compress="balanced"))

Lightning is optional, so `import fxcomp` does not import this module.
"""

# Lightning is not installed where types are checked
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster
from fxcomp.errors import BadOption, FxcompError
from fxcomp.frontends.ddp_hook import DdpHook, ddp_hook, states_of_files
from fxcomp.options import GivenCosts
from fxcomp.plan.compress import GivenCompress

NAMES = ("lightning.pytorch", "pytorch_lightning")
"""Import names of Lightning. The packages have unrelated classes, so the name that the script has imported is used."""


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
"""Resolver of checkpoint paths in Lightning; fsspec is installed with torch."""

FILE = "{checkpoint}.fxcomp-rank{rank}.pt"
"""Path of each rank's file with the tensors of `DdpHook.checkpoint`, next to a checkpoint."""
STEP = "lightning.global_step"
"""Key of the global step in a rank's file."""


class FxcompStrategy(_DDPStrategy):
    """DDPStrategy with fxcomp's hook, also on CPUs.

    `compress`, `cluster` and `costs` are as in `fxcomp.ddp_hook`; the scaler is Lightning's. Other `options` are passed
    to DDPStrategy, such as `find_unused_parameters=`. Raises BadPlan, and BadOption, for example for another hook
    (`ddp_comm_hook=`).
    """

    hook: DdpHook | None = None
    """Hook of the current or last training."""
    _trained: Any = None
    _begins_at: tuple[str, int | None] | None = None
    """Path and step of the checkpoint that training resumes from."""

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
        ddp_hook(**self._options)  # raise now instead of in training

    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        scaler = getattr(self.precision_plugin, "scaler", None)  # with precision="16-mixed", residuals follow its scale
        hook = ddp_hook(**self._options, scaler=scaler)
        self._keep(hook)
        self.model.register_comm_hook(self.model, hook)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write Lightning's checkpoint, and this rank's tensors next to it. Lightning calls it on all ranks."""
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if self.hook is None or "loops" not in checkpoint:  # save_weights_only=True
            return
        files = _Files(filepath)
        files.write(self.global_rank, {**self.hook.checkpoint(), STEP: torch.tensor(checkpoint["global_step"])})
        if self.is_global_zero:  # files of an earlier job with more ranks
            files.remove(self.world_size)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            _Files(filepath).remove()

    def load_checkpoint(self, checkpoint_path: Any, *arguments: Any, **named: Any) -> Any:
        library: Any = super()
        loaded = library.load_checkpoint(checkpoint_path, *arguments, **named)
        if self.lightning_module.trainer.state.fn == "fit":
            self._begins_at = str(checkpoint_path), loaded.get("global_step")
        return loaded

    def _keep(self, hook: DdpHook) -> None:
        """Make `hook` the current hook, and load into it the state of the checkpoint or the last fit."""
        before, of = self.hook, self._trained
        self.hook, self._trained = hook, self.lightning_module
        if self._begins_at is not None:
            hook.load_state_dict(self._saved_for_here(*self._begins_at))
            self._begins_at = None
        elif before is not None and of is self.lightning_module:
            hook.load_state_dict(_state_of(before))
        if before is not None:
            before.close()

    def _saved_for_here(self, checkpoint: str, step: int | None) -> list[Any] | None:
        """Read this rank's share of the saved files. Skip files of another step."""
        files = _Files(checkpoint, follow=True)
        places = files.of_ranks()
        if not places and self.is_global_zero:
            _warn(f"{checkpoint!r} has no state next to it: earlier residuals are lost, once.")

        def read(rank: int) -> dict[str, Tensor] | None:
            tensors = files.read(rank)
            saved_at = int(tensors.pop(STEP, torch.tensor(step)))
            if saved_at != step:
                _warn(
                    f"{checkpoint!r} is of step {step}, and rank {rank}'s file next to it of step {saved_at}: a job"
                    " ended while it saved. The file is not used, and the residuals of that rank are lost, once; or go"
                    " on from another checkpoint."
                )
            return tensors if saved_at == step else None

        return states_of_files(places, read)

    def teardown(self) -> None:
        if self.hook is not None:
            self.hook.close()
        super().teardown()


class _Files:
    """Rank files of a checkpoint in any fsspec file system."""

    def __init__(self, checkpoint: Any, *, follow: bool = False):
        """If `follow`, resolve a checkpoint path that is a local link, as `save_last="link"` makes."""
        self._system, self._place = url_to_fs(str(checkpoint))
        self._is_local = "file" in self._system.protocol
        if follow and self._is_local:
            self._place = os.path.realpath(self._place)

    def write(self, rank: int, tensors: Mapping[str, Tensor]) -> None:
        """Write a rank's file atomically."""
        place = FILE.format(checkpoint=self._place, rank=rank)
        if self._is_local:
            compat.write_atomically(Path(place), lambda at: torch.save(dict(tensors), at))
        else:  # other file systems only show complete files
            held = io.BytesIO()
            torch.save(dict(tensors), held)
            self._system.makedirs(self._place.rpartition("/")[0], exist_ok=True)
            self._system.pipe_file(place, held.getvalue())

    def read(self, rank: int) -> dict[str, Tensor]:
        with self._system.open(self.of_ranks()[rank], "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)

    def remove(self, first: int = 0) -> None:
        """Remove the files of ranks from `first` on."""
        for rank, place in self.of_ranks().items():
            if rank >= first:
                with contextlib.suppress(FileNotFoundError):
                    self._system.rm_file(place)

    def of_ranks(self) -> dict[int, str]:
        if "http" in self._system.protocol:  # HTTP has no folder listing
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
    try:
        return before.state_dict()
    except FxcompError as error:
        _warn(f"this fit begins without the residuals of the fit before: {error}")
        return None


def _warn(text: str) -> None:
    warnings.warn(f"fxcomp: {text}", stacklevel=4)
