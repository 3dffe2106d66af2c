"""A rank's file of a checkpoint that cannot be read is named, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import Tensor

from fxcomp.errors import FxcompError
from fxcomp.frontends.ddp_hook import states_of_files
from fxcomp.state.checkpoint import to_tensors
from fxcomp.state.checksums import sealed
from fxcomp.state.fields import VERSION

Read = Callable[[Path], Any]


def state(rank: int, version: int = VERSION) -> dict[str, Tensor]:
    place = {"start": 0, "size": 64, "slot": 0, "place": 0, "weight": [1, 1], "total": [1, 1]}
    plain: dict[str, Any] = {"version": version, "plan": "0", "rank": rank, "ranks": 2, "steps": 3}
    residuals = {"a": [{"values": torch.ones(64), **place}]}
    return to_tensors(sealed({**plain, "residuals": residuals, "owed": {}, "compressors": {}, "learning_rates": {}}))


def pickled(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "nothing written": lambda _: b"",
    "one byte": lambda data: data[:1],
    "half": lambda data: data[: len(data) // 2],
    "without the last byte": lambda data: data[:-1],
    "zeros": lambda data: bytes(len(data)),
    "text": lambda _: b"<html>" * 99,
    **{f"byte {place} flipped": lambda data, place=place: flipped(data, place) for place in (0, 100)},
}
"""Damages that no format survives."""


def refused(files: dict[int, Path], read: Read) -> str:
    try:
        states_of_files(files, lambda rank: read(files[rank]))
    except FxcompError as error:
        return f"{type(error).__name__}: {error}"
    return "read"


def all_refused(folder: Path, save: Any, read: Read) -> dict[str, str]:
    """Return this rank's error by the damage of rank 1's file."""
    files = {rank: folder / f"of rank{rank}" for rank in range(2)}
    mine, told = files[dist.get_rank()], dict[str, str]()
    save(state(dist.get_rank()), str(mine))
    told["whole"] = refused(files, read)
    data = mine.read_bytes()

    def with_file(name: str, damaged: bytes | None) -> None:
        if dist.get_rank() == 1:
            mine.unlink() if damaged is None else mine.write_bytes(damaged)
        told[name] = refused(files, read)

    for name, damage in DAMAGES.items():
        with_file(name, damage(data))
    with_file("a value", flipped(data, data.index(torch.ones(64).numpy().tobytes())))
    with_file("gone", None)
    save({"weight": torch.ones(2)} if dist.get_rank() else state(0), str(mine))
    told["no state"] = refused(files, read)
    save(state(dist.get_rank(), VERSION + dist.get_rank()), str(mine))
    told["newer"] = refused(files, read)
    save(state(dist.get_rank()), str(mine))
    told["whole again"] = refused(files, read)
    return told


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_a_damaged_file_is_refused_by_name_on_every_rank(kind: str, tmp_path: Path):
    library = pytest.importorskip("safetensors.torch") if kind == "safetensors" else None
    save, read = (library.save_file, library.load_file) if library else (torch.save, pickled)
    other, reader = run_ranks(2, all_refused, tmp_path, save, read)
    for name, text in reader.items():
        if name.startswith("whole"):
            assert text == other[name] == "read"
            continue
        assert text.startswith(f"BadState: '{tmp_path}/of rank1', the file of rank 1, cannot be used: "), name
        assert "\n  Load " in text or "\n  Pass " in text, name
        assert "trusted source" not in text, "torch advises weights_only=False, which would run code from the file"
        assert other[name] == f"PeerFailed: rank 1 failed in reading the ranks' files: {text}", name
    assert "its checksum is wrong" in reader["a value"]
    assert "this is not a saved state: it has no residuals" in reader["no state"]
    assert "Load it with the fxcomp that saved it" in reader["newer"]
    assert "FileNotFoundError" in reader["gone"]
