"""Read what steps saved from a checkpoint of `torch.distributed.checkpoint`, on as many ranks as there are now."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fxcomp.errors import BadState
from fxcomp.state.checkpoint import saved_ranks


def read_checkpoint(
    folder: str | Path, under: str = "step", *, rank: int | None = None, ranks: int | None = None
) -> dict[str, Tensor]:
    """Read this rank's part of what `dcp.save({under: step.checkpoint(), ...})` wrote into a `folder`.

    `under` is the key there. Of r `ranks`, `rank` i, by default those of the process group, reads what the ranks i, i +
    r, i + 2r, ... saved, so that each state is read once. Give the result to `load_state_dict`; it is empty on a rank
    for which nothing was saved. No rank waits for another. Raises BadState.
    """
    # imported here: it takes a third of a second, which steps without checkpoints need not pay
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load  # pyright: ignore[reportUnknownVariableType]

    if not isinstance(folder, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadState(f"read_checkpoint takes the path of a folder; it is a {type(folder).__name__}")
    if not (Path(folder) / ".metadata").is_file():
        raise BadState(
            f"{str(folder)!r} holds no whole checkpoint: its .metadata, which is written last, is not there.\n"
            "  Load an earlier one."
        )
    in_group = dist.is_initialized()
    rank = (dist.get_rank() if in_group else 0) if rank is None else rank
    ranks = (dist.get_world_size() if in_group else 1) if ranks is None else ranks
    kept = FileSystemReader(folder).read_metadata().state_dict_metadata
    names = [name.removeprefix(f"{under}.") for name in kept if name.startswith(f"{under}.")]
    savers = saved_ranks(names)
    if not savers:
        parts = ", ".join(sorted({repr(name.split(".")[0]) for name in kept}))
        raise BadState(
            f"the checkpoint in {str(folder)!r} holds no state of a step under {under!r}; it holds {parts}.\n"
            f"  Save it with {{{under!r}: step.checkpoint(), ...}}."
        )
    mine = {f"rank{saver}" for saver in savers if saver % ranks == rank}
    room: dict[str, Tensor] = {}
    for name in names:
        about = kept[f"{under}.{name}"]
        if name.split(".")[0] in mine and isinstance(about, TensorStorageMetadata):
            room[name] = torch.empty(about.size, dtype=about.properties.dtype)
    with warnings.catch_warnings():  # DCP warns of what `no_dist` asks for
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        if room:
            load({under: room}, checkpoint_id=folder, no_dist=True)
    return room
