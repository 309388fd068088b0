import json
import re

import pytest

from trueup import errors
from trueup.errors import ConfigError, DataError, Fault, TransportFault, TrueupError, from_dict


def classes() -> list[type[TrueupError]]:
    found, stack = [], [TrueupError]
    while stack:
        found.append(stack.pop())
        stack.extend(found[-1].__subclasses__())
    return [cls for cls in found if cls.__module__ == errors.__name__]


def drawn_tree() -> dict[str, str | None]:
    """{class: parent} as the module's docstring draws it; a level is four columns."""
    parents: dict[str, str | None] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        drawn = re.match(r"^((?:│   |    )*(?:├── |└── )?)([A-Z]\w+)(?:\s{2,}|$)", line)
        if drawn is None:
            continue
        depth = len(drawn[1]) // 4
        parents[drawn[2]] = path[depth - 1] if depth else None
        path[depth:] = [drawn[2]]
    return parents


def test_the_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    names = {cls.__name__ for cls in classes()}
    actual = {
        cls.__name__: next((b.__name__ for b in cls.__bases__ if b.__name__ in names), None)
        for cls in classes()
    }
    assert drawn_tree() == actual


def test_no_two_errors_share_a_kind() -> None:
    kinds = [cls.kind for cls in classes()]
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize("cls", classes(), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("value", [3, 0.5, "x", True, None])
def test_every_error_crosses_a_process_boundary(cls: type[TrueupError], value: object) -> None:
    sent = cls(field="a.b", rule="whole", value=value)
    received = from_dict(json.loads(json.dumps(sent.as_dict())))
    assert type(received) is cls
    assert received.as_dict() == sent.as_dict()
    assert str(received) == f"a.b must be whole, got {value!r}"
    assert received.exit_code == cls.exit_code


def test_a_value_that_json_lacks_crosses_as_its_text() -> None:
    sent = ConfigError(field="a", rule="short", value=(1, 2))
    received = from_dict(json.loads(json.dumps(sent.as_dict())))
    assert received.value == "(1, 2)"
    assert received.message == sent.message == "a must be short, got (1, 2)"


def test_an_error_of_unknown_kind_is_a_fault_and_keeps_its_message() -> None:
    received = from_dict({"kind": "from the future", "message": "broken"})
    assert type(received) is Fault
    assert received.message == "broken"


def test_a_message_replaces_the_sentence() -> None:
    assert str(TransportFault("gone", field="v")) == "gone"


@pytest.mark.parametrize(("cls", "code"), [(ConfigError, 2), (DataError, 3), (TransportFault, 3)])
def test_exit_codes_tell_wrong_usage_from_faults(cls: type[TrueupError], code: int) -> None:
    assert cls("x").exit_code == code


def test_errors_are_also_those_of_the_standard_library() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(DataError, ValueError)
    assert issubclass(TransportFault, RuntimeError)
