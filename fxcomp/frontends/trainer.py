"""Callback for `transformers.Trainer`: average gradients with fxcomp, and keep residuals in checkpoints.

    trainer.add_callback(FxcompCallback(trainer, compress="balanced"))

Training logs include the hook's metrics, as `fxcomp/sent_mb`. transformers is optional, so `import fxcomp` does not
import this module.
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster
from fxcomp.frontends.ddp_hook import DdpHook, ddp_hook, states_of_files
from fxcomp.options import GivenCosts
from fxcomp.plan.compress import GivenCompress

try:
    import transformers
    from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
    from transformers.trainer_utils import get_last_checkpoint  # pyright: ignore[reportUnknownVariableType]
except ImportError as error:
    raise ImportError(f"FxcompCallback needs {error.name}.\n  pip install 'fxcomp[trainer]'", name=error.name) from None

FILE = "fxcomp-rank{rank}.safetensors"
"""Name of each rank's file with the tensors of `DdpHook.checkpoint`, in a checkpoint folder."""


class FxcompCallback(transformers.TrainerCallback):
    """Callback that registers a hook with the trainer's DistributedDataParallel.

    `trainer` is the owner of the callback; its `train` is patched to record the resumed checkpoint. `compress`,
    `cluster` and `costs` are as in `fxcomp.ddp_hook`; the scaler is the trainer's.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        compress: GivenCompress = "balanced",
        cluster: Cluster | None = None,
        costs: GivenCosts | None = None,
    ):
        self._trainer = trainer
        self._compress: GivenCompress = compress
        self._cluster, self._costs = cluster, costs
        self.hook: DdpHook | None = None
        """Hook of the current or last training."""
        self._model: Any = lambda: None
        """Weak reference to the model with the hook."""
        self._goes_on: Any = None
        """Last value of `resume_from_checkpoint`."""
        for name in ("train", "_inner_training_loop"):  # the second receives the choice of a subclass's `train`
            self._note_folder(name)

    def _note_folder(self, name: str) -> None:
        """Patch a trainer's method to record `resume_from_checkpoint`, which callbacks do not receive."""
        method = getattr(self._trainer, name, None)
        if method is None:
            return

        @functools.wraps(method)
        def noting(*arguments: Any, **named: Any) -> Any:
            first = arguments[0] if arguments and name == "train" else None
            self._goes_on = named.get("resume_from_checkpoint", first)
            return method(*arguments, **named)

        setattr(self._trainer, name, noting)

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Register a hook, once per model, and load the resumed state."""
        model = self._trainer.model_wrapped
        model = getattr(model, "_orig_mod", model)  # with torch_compile=True
        folder = self._begins_at(args, state)
        if not isinstance(model, DistributedDataParallel):
            if folder is not None and _files(folder):
                _warn(f"{str(folder)!r} has states of several ranks, and this trainer averages nothing by a hook:")
            return
        self._log_first()
        given = None if folder is None else _saved_for_here(folder)
        if self.hook is not None and self._model() is model:
            self.hook.begin_again(self.hook.state_dict() if folder is None else given)
            return
        scaler = self._trainer.accelerator.scaler  # with fp16=True, residuals follow its scale
        self.hook = ddp_hook(compress=self._compress, cluster=self._cluster, costs=self._costs, scaler=scaler)
        if given is not None:
            self.hook.load_state_dict(given)
        model.register_comm_hook(None, self.hook)  # pyright: ignore[reportUnknownMemberType]
        self._model = weakref.ref(model)

    def _begins_at(self, args: Any, state: Any) -> Path | None:
        """Return the checkpoint folder that training resumes from: the given folder, else the last step's folder."""
        given = cast("Any", get_last_checkpoint(args.output_dir)) if self._goes_on is True else self._goes_on
        if given:
            return Path(given)
        return _folder(args, state) if state.global_step else None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        del args, control
        if self.hook is None or logs is None or "loss" not in logs:
            return
        metrics = self.hook.metrics(residuals=True).items()
        told = {
            f"fxcomp/{name}": value for name, value in metrics if not isinstance(value, str) and math.isfinite(value)
        }
        logs.update(told)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(told)

    def _log_first(self) -> None:
        """Move this callback before the logging callbacks."""
        handler = self._trainer.callback_handler
        handler.callbacks = [self, *(each for each in handler.callbacks if each is not self)]

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        folder, saved = _folder(args, state), self.hook.checkpoint() if self.hook is not None else {}
        if saved:
            path = folder / FILE.format(rank=dist.get_rank())
            compat.write_atomically(path, lambda at: save_file(saved, at))
        ranks = dist.get_world_size() if saved else 0
        if not saved or dist.get_rank() == 0:  # remove files of an earlier job with more ranks
            for stale in (each for rank, each in _files(folder).items() if rank >= ranks):
                stale.unlink(missing_ok=True)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self.hook is not None:
            self.hook.close()


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _files(folder: Path) -> dict[int, Path]:
    """Return the ranks' files, by rank."""
    found = {each.stem.removeprefix("fxcomp-rank"): each for each in folder.glob(FILE.format(rank="*"))}
    return {int(rank): each for rank, each in found.items() if rank.isdecimal()}


def _warn(text: str) -> None:
    warnings.warn(f"fxcomp: {text} earlier residuals are lost, once.", stacklevel=3)


def _saved_for_here(folder: Path) -> list[Any] | None:
    files = _files(folder)
    if not files and dist.get_rank() == 0:
        _warn(f"{str(folder)!r} has no state of a hook:")
    return states_of_files(files, lambda rank: load_file(files[rank]))
