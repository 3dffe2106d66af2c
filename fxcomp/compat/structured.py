"""Write artifacts to torch's structured trace (TORCH_TRACE), which tlparse renders."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

from torch._logging import _internal  # pyright: ignore[reportPrivateUsage]


def is_traced() -> bool:
    """Return whether TORCH_TRACE names a folder."""
    return any(getattr(handler, "root_dir", None) is not None for handler in _internal.trace_log.handlers)


def trace_artifact(name: str, found: str | dict[str, Any]) -> None:
    """Write text or JSON data; call only if `is_traced`."""
    encoding, text = ("string", found) if isinstance(found, str) else ("json", json.dumps(found, indent=1))
    trace = cast("Callable[..., None]", _internal.trace_structured)
    about = {"name": f"fxcomp_{name}", "encoding": encoding}
    trace("artifact", metadata_fn=lambda: about, payload_fn=lambda: text, expect_trace_id=False)
