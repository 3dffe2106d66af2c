"""Read a folder of torch.distributed.checkpoint without running code from it.

Imported when it is used, because torch.distributed.checkpoint takes 0.3 s.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import sys
import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar, cast

import torch
import torch.distributed.checkpoint.metadata as formats
from torch import Tensor, serialization
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load  # pyright: ignore[reportUnknownVariableType]

from fxcomp.errors import BadState

_CLASSES: list[Any] = [
    *(each for each in vars(formats).values() if getattr(each, "__module__", "") == formats.__name__),
    filesystem._StorageInfo,  # pyright: ignore[reportPrivateUsage]
    serialization._get_layout,  # pyright: ignore
    torch.Size,
    pathlib.PosixPath,
    pathlib.PurePosixPath,
]
"""All that a checkpoint's `.metadata` names, besides element types."""


_Python: Any = vars(pickle)["_Unpickler"]
"""Unpickler in Python: the one in C allocates as much memory as a few bytes demand."""


class _Unpickler(_Python):
    """Unpickler that calls nothing else, and changes no class."""

    dispatch: ClassVar[dict[int, Any]] = _Python.dispatch.copy()

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = vars(sys.modules.get(module_name, pickle)).get(global_name)
        if isinstance(found, torch.dtype) or any(found is each for each in _CLASSES):
            return found
        raise pickle.UnpicklingError(f"its .metadata names {module_name}.{global_name}, which no checkpoint needs")

    def _build(self) -> None:
        if isinstance(self.stack[-2], type | FunctionType):
            raise pickle.UnpicklingError(f"its .metadata changes {self.stack[-2]}")
        _Python.load_build(self)

    dispatch[pickle.BUILD[0]] = _build


class _Reader(filesystem.FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> formats.Metadata:
        return self._metadata

    @cached_property
    def _metadata(self) -> formats.Metadata:
        """Metadata. Raise if they name a file outside of the folder, or more than a file holds."""
        folder = Path(cast("Any", self).path)
        found = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
        if not isinstance(found, formats.Metadata):
            raise pickle.UnpicklingError(f"its .metadata is a {type(found).__name__}")
        held = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
        for at in found.storage_data.values():
            if not 0 <= at.offset <= at.offset + at.length <= held[at.relative_path]:
                raise ValueError(f"{at.relative_path} is shorter than the .metadata needs")
        found.storage_meta = found.storage_meta or formats.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def read(folder: Path, under: str, wanted: Callable[[str], bool]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the `wanted` tensors, named without `under`, and the names of all. Raises BadState."""
    try:
        reader = _Reader(folder)
        known = reader.read_metadata().state_dict_metadata
        room: dict[str, Tensor] = {}
        for name, about in known.items():
            inner = name.removeprefix(f"{under}.")
            if inner != name and wanted(inner) and isinstance(about, formats.TensorStorageMetadata):
                room[inner] = torch.empty(about.size, dtype=about.properties.dtype)
        with warnings.catch_warnings():  # of `no_dist`
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            if room:
                load({under: room}, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:  # the second is no Exception
        failures = cast("Any", getattr(error, "failures", {}))
        cause = next(iter(failures.values()))[0] if failures else error
        raise BadState(f"{type(cause).__name__}: {cause}") from None
    return room, list(known)
