"""Training text that every machine has: the source of Python's own standard library, a byte a token."""

from __future__ import annotations

import os
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from fxcomp.errors import TextMissing

VOCABULARY = 256
_VALIDATION_EVERY = 10  # files
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}


@dataclass(frozen=True)
class Text:
    """Tokens to learn from and tokens to judge by, from different files."""

    train: torch.Tensor  # uint8
    validation: torch.Tensor  # uint8
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]


def load_text(limit_bytes: int = 4_000_000, folder: Path | None = None) -> Text:
    """Read Python files, by name, until there are `limit_bytes`; every tenth file is kept for validation."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    names: dict[bool, list[str]] = {True: [], False: []}
    total = 0
    for index, path in enumerate(_python_files(folder)):
        if total >= limit_bytes:
            break
        content = path.read_bytes()[: limit_bytes - total]
        total += len(content)
        is_validation = index % _VALIDATION_EVERY == _VALIDATION_EVERY - 1
        parts[is_validation].append(content)
        names[is_validation].append(path.relative_to(folder).as_posix())
    if not parts[True]:
        raise TextMissing(
            f"the training text is the standard library's source, but {folder} has fewer than {_VALIDATION_EVERY} "
            "Python files.\n  Use a Python that was installed with its sources."
        )
    return Text(_tokens(parts[False]), _tokens(parts[True]), tuple(names[False]), tuple(names[True]))


def draw_batch(
    tokens: torch.Tensor, *, step: int, rank: int, size: int = 8, context: int = 128, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets (each `size` × `context`): passages that depend on step, rank and seed alone."""
    # torch's CPU generator hears only the low 32 bits of a seed, so mix the three into as many.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {step} {rank}".encode()))
    starts = torch.randint(len(tokens) - context, (size,), generator=generator)
    passages = tokens[starts[:, None] + torch.arange(context + 1)].long()
    return passages[:, :-1].contiguous(), passages[:, 1:].contiguous()


def _python_files(folder: Path) -> list[Path]:
    """List Python files by name. Skipped folders are not entered, because most files are there."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        found += [Path(place, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _tokens(parts: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8)
