import contextlib
import dataclasses
import enum
import inspect
import math
import struct
import types as python_types
import typing
from array import array
from dataclasses import dataclass

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trueup import types
from trueup.errors import DataError
from trueup.training import messages
from trueup.training.codec import pack, register, unpack

RECORDS = [
    value
    for module in (types, messages)
    for value in vars(module).values()
    if dataclasses.is_dataclass(value) and value.__module__ == module.__name__
]
ENUMS = [
    value
    for value in vars(types).values()
    if inspect.isclass(value) and issubclass(value, enum.StrEnum) and value is not enum.StrEnum
]
INT64 = st.integers(-(2**63), 2**64 - 1)
FLOATS = st.floats(allow_nan=False)


class Integers:
    """Stands for array[int], which is nothing but a name at run time."""


class Floats:
    """Stands for array[float]."""


ARRAYS = {
    Integers: st.lists(st.integers(-128, 127)).map(lambda x: array("b", x))
    | st.lists(st.integers(-(2**31), 2**31 - 1)).map(lambda x: array("i", x)),
    Floats: st.lists(st.floats(width=32, allow_nan=False)).map(lambda x: array("f", x)),
}


def values_of(kind: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Values of an annotated type."""
    if kind in ARRAYS:
        return ARRAYS[kind]
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, localns={"array": {int: Integers, float: Floats}})
        return st.builds(kind, **{name: values_of(hint) for name, hint in hints.items()})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    if origin is dict:
        return st.dictionaries(*map(values_of, arguments), max_size=3)
    if origin in (typing.Union, python_types.UnionType):
        return st.one_of(*map(values_of, arguments))
    if inspect.isclass(kind) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    return {
        int: INT64,
        float: FLOATS,
        str: st.text(max_size=5),
        bytes: st.binary(max_size=5),
        bool: st.booleans(),
        type(None): st.none(),
    }[kind]


def test_there_are_records_to_test():
    assert {types.Episode, types.Completion, messages.StepReport} < set(RECORDS)
    assert {types.KVState, types.EpisodeStatus} < set(ENUMS)


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_record_comes_back_equal(kind: type):
    @settings(max_examples=15)
    @given(values_of(kind))
    def holds(value: object) -> None:
        back = unpack(pack(value))
        assert back == value
        assert type(back) is kind

    holds()


@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
def test_enums_come_back_as_themselves(kind: type[enum.StrEnum]):
    for member in kind:
        assert unpack(pack(member)) is member
    assert unpack(pack(dict.fromkeys(kind, 1))) == dict.fromkeys(kind, 1)


PLAIN = st.recursive(
    st.none() | st.booleans() | INT64 | FLOATS | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(PLAIN)
@example((1, (2, (3, ())), {"a": ((),)}))
def test_nested_tuples_and_mappings_come_back_equal(value: object):
    assert unpack(pack(value)) == value


def test_lists_come_back_as_tuples():
    assert unpack(pack([1, [2, []]])) == (1, (2, ()))


@pytest.mark.parametrize("typecode", sorted("bBhHiIqQfd"))
def test_arrays_keep_type_and_bits(typecode: str):
    value = array(typecode, [0, 1, 100])
    back = unpack(pack(value))
    assert (back.typecode, back) == (typecode, value)
    assert unpack(pack(array(typecode))) == array(typecode)


def test_missing_log_probs_stay_missing():
    back = unpack(pack(array("f", [math.nan, -math.inf, -0.5])))
    assert math.isnan(back[0])
    assert list(back[1:]) == [-math.inf, -0.5]


@dataclass
class Foreign:
    value: int = 0


class Sub(dict):
    pass


@pytest.mark.parametrize(
    "value",
    [Foreign(), {1, 2}, object(), print, Sub(), 1j, 2**64, -(2**63) - 1, "\ud800", array("l", [1])],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_a_record_is_refused(value: object):
    with pytest.raises(DataError, match="cannot encode"):
        pack(value)
    with pytest.raises(DataError, match="cannot encode"):
        pack((1, {"inside": value}))


def test_a_class_of_a_known_name_is_still_not_that_record():
    impostor = dataclasses.make_dataclass("Task", ["id", "split"])
    with pytest.raises(DataError, match="not a registered record"):
        pack(impostor("a", "train"))
    with pytest.raises(AssertionError, match="two records named Task"):
        register(impostor)
    register(types.Task)
    assert unpack(pack(types.Task(id="a", split="train"))) == types.Task(id="a", split="train")


def extension_code(value: object) -> int:
    """How msgpack tags values of this kind."""
    code: int = msgpack.unpackb(pack(value), ext_hook=msgpack.ExtType).code
    return code


RECORD = extension_code(types.Task(id="a", split="train"))
ARRAY = extension_code(array("b"))
ENUM = extension_code(types.KVState.FRESH)


def tagged(code: int, content: bytes) -> bytes:
    return msgpack.packb(msgpack.ExtType(code, content))


def record(*content: object) -> bytes:
    return tagged(RECORD, msgpack.packb(content))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        pack(1) + pack(2),
        record(),
        record("Foreign", 1),
        record("os.system", "true"),
        record("dataclass"),
        record("StrEnum", "a"),
        record("Task", "a"),
        record("Task", "a", "train", "more"),
        record("KVState", "fresh"),
        record(("Task",), "a", "train"),
        record({}, "a"),
        tagged(RECORD, msgpack.packb(7)),
        tagged(RECORD, b""),
        tagged(ENUM, b""),
        tagged(ENUM, b"KVState:stale"),
        tagged(ENUM, b"StrEnum:a"),
        tagged(ENUM, b"Task:a"),
        tagged(ENUM, b"\xff\xfe:a"),
        tagged(ARRAY, b""),
        tagged(ARRAY, b"u" + bytes(4)),
        tagged(ARRAY, b"l" + bytes(8)),
        tagged(ARRAY, b"i" + bytes(3)),
        tagged(99, b"x"),
    ],
    ids=repr,
)
def test_foreign_bytes_are_refused(data: bytes):
    with pytest.raises(DataError, match="cannot decode"):
        unpack(data)


def test_bytes_nested_without_end_are_refused():
    data = pack(0)
    for _ in range(20_000):
        data = (
            b"\xc9" + struct.pack(">Ib", len(data), RECORD) + data
        )  # a record that holds a record
    with pytest.raises(DataError, match="cannot decode"):
        unpack(data)


COMPLETION = types.Completion(
    session="a",
    token_ids=array("i", [5, 6]),
    logps=array("f", [-1.0, -2.0]),
    spans=(types.Span(start=0, stop=2, version=3, engine="e", epoch=0, precision="float32"),),
    finish=types.FinishReason.STOP,
    tokens_prefilled=1,
    tokens_cached=0,
    tokens_recomputed=0,
    t_submit=0.0,
    t_start=0.0,
    t_end=1.0,
)


def test_a_record_cut_short_anywhere_is_refused():
    data = pack(COMPLETION)
    for length in range(len(data)):
        with pytest.raises(DataError):
            unpack(data[:length])


@settings(max_examples=300)
@given(st.integers(0, len(pack(COMPLETION)) - 1), st.integers(1, 255))
def test_a_flipped_byte_gives_a_value_or_a_data_error(position: int, flip: int):
    data = bytearray(pack(COMPLETION))
    data[position] ^= flip
    with contextlib.suppress(DataError):
        unpack(bytes(data))
