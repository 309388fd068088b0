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

_CLASSES: dict[str, Any] = {
    name: value
    for name, value in vars(types).items()
    if dataclasses.is_dataclass(value) or (isinstance(value, type) and issubclass(value, StrEnum))
}


def register(*classes: type) -> None:
    """Let further record classes travel; names must be unique."""
    for cls in classes:
        assert _CLASSES.setdefault(cls.__name__, cls) is cls, f"two records named {cls.__name__}"


def pack(value: Any) -> bytes:
    """Encode plain values, registered records, enums and arrays.

    Raises:
        DataError: A value of another type.
    """
    try:
        packed: bytes = msgpack.packb(value, default=_tag, strict_types=True)
    except TypeError as error:
        raise DataError(f"cannot encode: {error}", field="record", rule="encodable") from None
    return packed


def unpack(data: bytes) -> Any:
    """The inverse of `pack`; sequences come back as tuples.

    Raises:
        DataError: Truncated or foreign bytes, or a record that is not registered.
    """
    try:
        return msgpack.unpackb(data, ext_hook=_untag, use_list=False, strict_map_key=False)
    except (ValueError, KeyError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise DataError(f"cannot decode: {error}", field="record", rule="encoded by pack") from None


def _tag(value: Any) -> Any:
    name = type(value).__name__
    if isinstance(value, array):
        return msgpack.ExtType(_ARRAY, value.typecode.encode() + value.tobytes())
    if isinstance(value, tuple):
        return list(value)
    if _CLASSES.get(name) is not type(value):
        raise TypeError(f"{name} is not a registered record")
    if isinstance(value, StrEnum):
        return msgpack.ExtType(_ENUM, f"{name}:{value.value}".encode())
    values = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return msgpack.ExtType(_RECORD, pack([name, *values]))


def _untag(code: int, data: bytes) -> Any:
    if code == _ARRAY:
        typecode = chr(data[0])
        if typecode not in _TYPECODES:
            raise ValueError(f"array of {typecode!r}")
        return array(typecode, data[1:])
    if code == _ENUM:
        name, _, value = data.decode().partition(":")
        return _CLASSES[name](value)
    if code == _RECORD:
        name, *values = unpack(data)
        cls = _CLASSES[name]
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**dict(zip(names, values, strict=True)))
    raise ValueError(f"extension {code}")
