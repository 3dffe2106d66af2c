"""Check data against a JSON Schema, as far as those here use it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list, tuple),
    "object": (Mapping,),
}
_KNOWN = {
    *("$schema", "title", "description", "type", "properties", "required", "additionalProperties", "items"),
    *("anyOf", "enum", "const"),
}


def flaws(data: Any, schema: Mapping[str, Any], place: str = "report") -> Iterator[str]:
    """Say what does not fit, each with its place."""
    assert set(schema) <= _KNOWN, f"{place}: this checker does not know {set(schema) - _KNOWN}"
    if "anyOf" in schema:
        found = [list(flaws(data, each, place)) for each in schema["anyOf"]]
        if all(found):
            yield from min(found, key=len)
        return
    if "const" in schema and data != schema["const"]:
        yield f"{place} is {data!r}, not {schema['const']!r}"
    if "enum" in schema and data not in schema["enum"]:
        yield f"{place} is {data!r}, none of {schema['enum']}"
    kind = schema.get("type")
    if kind is None:
        return
    if not isinstance(data, _TYPES[kind]) or (isinstance(data, bool) and kind != "boolean"):
        yield f"{place} is {type(data).__name__}, not {kind}"
        return
    if kind == "array" and "items" in schema:
        for number, item in enumerate(data):
            yield from flaws(item, schema["items"], f"{place}[{number}]")
    if kind == "object":
        properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        yield from (f"{place} lacks {name}" for name in schema.get("required", ()) if name not in data)
        for name, value in data.items():
            if name in properties:
                yield from flaws(value, properties[name], f"{place}.{name}")
            elif more is False:
                yield f"{place} has {name}, which the schema does not know"
            elif isinstance(more, Mapping):
                yield from flaws(value, more, f"{place}.{name}")
