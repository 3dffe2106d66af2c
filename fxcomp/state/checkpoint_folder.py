"""Read a folder of torch.distributed.checkpoint without running code from it.

Its pickles, the `.metadata` and one per tensor, become plain values. Classes and functions that they name are not used.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxcomp.errors import BadState

_OPCODES = """PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL NONE NEWTRUE
    NEWFALSE BININT BININT1 BININT2 LONG1 BINUNICODE SHORT_BINUNICODE SETITEM SETITEMS EMPTY_LIST APPEND
    APPENDS"""
"""Opcodes that are read as in Python. None allocates more memory than the file takes."""

_Python: Any = vars(pickle)["_Unpickler"]
"""Unpickler in Python: the one in C allocates as much memory as a few bytes demand."""


class _Object:
    """Fields of a pickled object, or its `state` if that is no dictionary. Equal to itself alone."""


class _Dict(dict[Any, Any]):
    """Dictionary that hashes texts and objects alone: numbers can be chosen to have the same hash."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(key) not in (str, _Object):
            raise pickle.UnpicklingError(f"its .metadata has a {type(key).__name__} as a key")
        super().__setitem__(key, value)


def _listed(count: int) -> Callable[[Any], None]:
    """Return the opcode that makes a list of the last `count` values."""
    return lambda reader: reader.append([reader.stack.pop() for _ in range(count)][::-1])


class _Unpickler(_Python):
    """Unpickler to plain values, for pickles of any release. It uses no class or function that a pickle names.

    A call becomes its arguments. Tuples become lists, which are not hashed: a tuple of 40 levels takes hours.
    """

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("its .metadata or a tensor has an opcode that no checkpoint needs")

    dispatch: ClassVar[dict[int, Callable[[Any], Any]]] = dict.fromkeys(range(256), _refuse)
    dispatch |= {code: _Python.dispatch[code] for code in (vars(pickle)[name][0] for name in _OPCODES.split())}
    dispatch |= {code: _listed(count) for count, code in enumerate(b")\x85\x86\x87")}  # EMPTY_TUPLE to TUPLE3
    dispatch[pickle.TUPLE[0]] = _Python.load_list
    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.append(_Dict())
    dispatch[pickle.BINPERSID[0]] = lambda _: None
    dispatch[pickle.REDUCE[0]] = lambda self: self.stack.pop(-2)

    def find_class(self, _: str, name: str, /) -> torch.dtype | None:
        found = vars(torch).get(name)
        return found if isinstance(found, torch.dtype) else None

    def _new(self) -> None:
        self.stack[-2:] = [_Object()]

    dispatch[pickle.NEWOBJ[0]] = _new

    def _build(self) -> None:
        state = self.stack.pop()
        self.stack[-1].__dict__ = state if isinstance(state, dict) else {"state": state}

    dispatch[pickle.BUILD[0]] = _build


def _tensor(folder: Path, at: Any, dtype: torch.dtype) -> Tensor:
    """Return the tensor that torch.save wrote to the slice `at` of a file."""
    with (folder / at.relative_path).open("rb") as file:
        file.seek(at.offset)
        parts = zipfile.ZipFile(given := io.BytesIO(file.read(at.length)))
    if any(part.compress_type for part in parts.infolist()):
        raise ValueError(f"{at.relative_path} has a compressed tensor, which can take any memory")
    storage, start, size, strides = _Unpickler(parts.open("archive/data.pkl")).load()[:4]
    parts.open(part := parts.getinfo("archive/data/" + storage[2]))  # `given` is now at its first byte: no copy is made
    raw = given.getbuffer()[given.tell() :][: part.file_size]
    return (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)).as_strided(size, strides, start)


def read(folder: Path, under: str, wanted: Callable[[str], bool]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the `wanted` tensors, named without `under`, and the names of all. Raises BadState."""
    try:
        found = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
        if not hasattr(found, "state_dict_metadata"):
            raise pickle.UnpicklingError(f"its .metadata is a {type(found).__name__}")
        room: dict[str, Tensor] = {}
        for name, about in found.state_dict_metadata.items():
            inner = name.removeprefix(f"{under}.")
            if inner != name and wanted(inner):
                room[name] = torch.empty(about.size[0], dtype=about.properties.state[0], device="meta")
        held = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
        for at in found.storage_data.values():
            if not 0 <= at.offset <= at.offset + at.length <= held[at.relative_path]:
                raise ValueError(f"{at.relative_path} is shorter than the .metadata needs")
        needed = sum(at.length for at in found.storage_data.values()), sum(value.nbytes for value in room.values())
        if max(needed) > sum(held.values()):
            raise ValueError("its files are shorter than the .metadata needs")
        room = {name: torch.empty_like(value, device="cpu") for name, value in room.items()}
        for index, at in found.storage_data.items():
            if index.fqn in room:
                part = _tensor(folder, at, room[index.fqn].dtype)
                spans = [slice(start, start + count) for start, count in zip(index.offset[0], part.shape, strict=True)]
                room[index.fqn][*spans].copy_(part)
    except Exception as error:
        raise BadState(f"{type(error).__name__}: {error}") from None
    return {name.removeprefix(f"{under}."): value for name, value in room.items()}, list(found.state_dict_metadata)
