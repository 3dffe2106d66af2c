"""Checksums of saved states, over all their data and tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from fxcomp import compat

_PIECES = 1024
"""Pieces of a tensor that have a checksum each; torch.hash_tensor alone does not depend on the order of elements."""


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with a checksum, or with a new one."""
    return {**state, compat.CHECKSUM: _checksum(state)}


def is_whole(state: Mapping[str, Any]) -> bool:
    """Return whether a state has the checksum of its content."""
    try:
        return state.get(compat.CHECKSUM) == _checksum(state)
    except (TypeError, ValueError, RuntimeError):  # contents that no state has, or too deep
        return False


def _checksum(state: Mapping[str, Any]) -> str:
    return compat.checksum(_summed({key: value for key, value in state.items() if key != compat.CHECKSUM}, {}))


def _summed(value: Any, seen: dict[int, Any]) -> Any:
    """Return `value` as JSON data. A list in two places is refused: 40 levels of such lists would take hours."""
    if isinstance(value, Tensor):
        if value.is_quantized or value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError("a tensor that would end the process, or need memory")
        return [str(value.dtype), list(value.shape), checksum_of_tensor(value)]
    if not isinstance(value, Mapping | list | tuple):
        return value
    parts = cast("Mapping[Any, Any] | list[Any]", value)
    if parts and id(parts) in seen:
        raise ValueError("a list or dictionary in two places")
    seen[id(parts)] = parts
    if isinstance(parts, Mapping):
        return {str(key): _summed(held, seen) for key, held in parts.items()}
    return [_summed(held, seen) for held in parts]


def checksum_of_tensor(value: Tensor) -> str:
    """Return a checksum of a tensor's bits, computed on its device if that has torch.hash_tensor."""
    held = value.detach() if value.device.type in ("cpu", "cuda") else value.detach().cpu()
    bits = held.contiguous().view(-1).view(torch.uint8)
    words = bits.numel() // (8 * _PIECES)
    main, rest = bits.tensor_split([8 * _PIECES * words])
    if main.storage_offset() % 8:
        main = main.clone()
    found = hashlib.sha256(rest.cpu().numpy().tobytes())
    if words:
        found.update(torch.hash_tensor(main.view(torch.int64).view(_PIECES, words), dim=1).cpu().numpy().tobytes())
    return found.hexdigest()[:16]
