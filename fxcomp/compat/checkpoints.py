"""Folders of torch.distributed.checkpoint, read without running what a file names.

torch's reader unpickles `.metadata`, which may call any function, and trusts the names and sizes of files in it.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Sequence
from math import prod
from pathlib import Path, PosixPath
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.serialization import _get_layout

from fxcomp.errors import BadState

_OWN = [each for each in vars(metadata).values() if getattr(each, "__module__", "") == metadata.__name__]
_NAMED: dict[tuple[str, str], Any] = {
    **{(each.__module__, each.__name__): each for each in (*_OWN, filesystem._StorageInfo, PosixPath, _get_layout)},
    **{("torch", name): each for name, each in vars(torch).items() if isinstance(each, torch.dtype)},
    ("torch", "Size"): torch.Size,
}


class _Unpickler(pickle._Unpickler):  # C's would allocate gigabytes for a file of ten bytes
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _NAMED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint") from None

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type | FunctionType):
            raise pickle.UnpicklingError(f"it changes {self.stack[-2]}")
        super().load_build()

    dispatch: ClassVar[Any] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}


class _Reader(filesystem.FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        """Read the metadata. Raises if a tensor is not in the folder's files, or tensors are larger than these."""
        folder = Path(str(self.path))
        found: metadata.Metadata = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
        found.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        sizes = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
        for at in found.storage_data.values():
            if not 0 <= at.offset <= at.offset + at.length <= sizes[at.relative_path]:
                raise ValueError(f"{at.relative_path} is shorter than its metadata says")
        tensors = [
            each for each in found.state_dict_metadata.values() if isinstance(each, metadata.TensorStorageMetadata)
        ]
        if sum(prod(each.size) * each.properties.dtype.itemsize for each in tensors) > sum(sizes.values()):
            raise ValueError("its files are smaller than its tensors")
        return found


class FolderReader:
    """Reader of the tensors in a checkpoint. Raises BadState."""

    def __init__(self, folder: str | Path) -> None:
        self._reader, self._folder = _Reader(folder), folder
        try:
            self._kept = self._reader.read_metadata().state_dict_metadata
            self.names = [str(name) for name in self._kept]
        except Exception as error:
            raise self._refusal(error) from None

    def read(self, under: str, names: Sequence[str]) -> dict[str, Tensor]:
        kept = {name: self._kept[f"{under}.{name}"] for name in names}
        try:
            room = {
                name: torch.empty(about.size, dtype=about.properties.dtype)
                for name, about in kept.items()
                if isinstance(about, metadata.TensorStorageMetadata)
            }
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                if room:
                    load({under: room}, storage_reader=self._reader, no_dist=True)
        except (Exception, CheckpointException) as error:
            raise self._refusal(error) from None
        return room

    def _refusal(self, error: BaseException) -> BadState:
        return BadState(
            f"cannot read the checkpoint in {str(self._folder)!r}: {type(error).__name__}: {str(error)[:200]}.\n"
            "  Load an earlier one."
        )
