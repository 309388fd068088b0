"""Records as bytes: msgpack with the types of `trueup.types`, and nothing that can run code.

Dataclasses, enums and arrays are tagged by name and rebuilt from a closed registry; every other
sequence comes back as a tuple. Used between processes and for payload files.
"""

from __future__ import annotations

import dataclasses
from array import array
from enum import StrEnum
from typing import Any

import msgpack

from trueup import types
from trueup.errors import DataError

_RECORD, _ARRAY, _ENUM = 1, 2, 3
_TYPECODES = frozenset("bBhHiIqQfd")
"""Element types of one size everywhere."""

_DEPTH = 16
"""Records within records; each level takes stack, which foreign bytes must not exhaust."""

_CLASSES: dict[str, Any] = {
    name: value
    for name, value in vars(types).items()
    if isinstance(value, type) and value.__module__ == types.__name__
}


def register(*classes: type) -> None:
    """Let further record classes travel; names must be unique."""
    for cls in classes:
        assert _CLASSES.setdefault(cls.__name__, cls) is cls, f"two records named {cls.__name__}"


def pack(value: Any) -> bytes:
    """Encode plain values, registered records, enums and arrays.

    Raises:
        DataError: A value of another type, an integer beyond 64 bits, or text that is not Unicode.
    """
    try:
        packed: bytes = msgpack.packb(value, default=_tag, strict_types=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"cannot encode: {error}", field="record", rule="encodable") from None
    return packed


def unpack(data: bytes) -> Any:
    """The inverse of `pack`; sequences come back as tuples.

    Raises:
        DataError: Truncated or foreign bytes, or a record that is not registered.
    """
    try:
        return _unpack(data, 0)
    except (ValueError, LookupError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise DataError(f"cannot decode: {error}", field="record", rule="encoded by pack") from None


def _tag(value: Any) -> Any:
    name = type(value).__name__
    if isinstance(value, array):
        if value.typecode not in _TYPECODES:
            raise TypeError(f"array of {value.typecode!r}")
        return msgpack.ExtType(_ARRAY, value.typecode.encode() + value.tobytes())
    if isinstance(value, tuple):
        return list(value)
    if _CLASSES.get(name) is not type(value):
        raise TypeError(f"{name} is not a registered record")
    if isinstance(value, StrEnum):
        return msgpack.ExtType(_ENUM, f"{name}:{value.value}".encode())
    values = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return msgpack.ExtType(_RECORD, pack([name, *values]))


def _unpack(data: bytes, depth: int) -> Any:
    if depth > _DEPTH:
        raise ValueError(f"records nested more than {_DEPTH} deep")

    def untag(code: int, content: bytes) -> Any:
        return _untag(code, content, depth)

    return msgpack.unpackb(data, ext_hook=untag, use_list=False, strict_map_key=False)


def _untag(code: int, data: bytes, depth: int) -> Any:
    if code == _ARRAY:
        typecode = chr(data[0])
        if typecode not in _TYPECODES:
            raise ValueError(f"array of {typecode!r}")
        return array(typecode, data[1:])
    if code == _ENUM:
        name, _, value = data.decode().partition(":")
        return _CLASSES[name](value)
    if code == _RECORD:
        name, *values = _unpack(data, depth + 1)
        cls = _CLASSES[name]
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**dict(zip(names, values, strict=True)))
    raise ValueError(f"extension {code}")
