"""Whether a row has the shape that its kind must have (`records.schema`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any

from trueup.records.audit.finding import Finding
from trueup.records.schema import Event
from trueup.scheduling import rules_from_dict


def malformed(event: Event) -> Iterator[Finding]:
    """Where a row's columns or payload are not of the shape that its kind must have."""
    for problem in _problems(event):
        yield Finding(
            invariant="schema",
            rule="a row is not of the shape that its kind must have",
            row=event.seq,
            detail=f"{event.kind}: {problem}",
        )


def _problems(event: Event) -> Iterator[str]:
    for name, kind in _COLUMNS.items():
        value = getattr(event, name)
        if type(value) is not kind:
            yield f"{name} must be {kind.__name__}, got {value!r}"
    for name, (kind, holds, words) in _FIELDS.get(event.kind, {}).items():
        value = event.payload.get(name)
        if type(value) is not kind or not holds(value):
            yield f"{name} must be {words}, got {value!r}"
    if event.kind == "finish" and type(event.payload.get("reward")) not in (float, int, NoneType):
        yield f"reward must be a number or null, got {event.payload['reward']!r}"


def _is_rules(value: Any) -> bool:
    try:
        rules_from_dict(value)
    except (TypeError, KeyError):
        return False
    return True


def _are_ids(value: Any) -> bool:
    return all(type(item) is str for item in value)


def _are_spans(value: Any) -> bool:
    return all(_is_span(span) for span in value)


def _is_span(span: Any) -> bool:
    if not isinstance(span, list) or len(span) != 4:
        return False
    return all(type(value) is kind for value, kind in zip(span, (int, str, int, int), strict=True))


def _anything(value: Any) -> bool:
    return True


_COLUMNS = {"episode": str, "attempt": int, "group": int, "version": int, "engine": str}

_Shape = tuple[type, Callable[[Any], bool], str]
_TEXT: _Shape = (str, _anything, "text")
_COUNT: _Shape = (int, _anything, "an integer")
_RULES: _Shape = (dict, _is_rules, "the Scheduler's parameters")
_IDS: _Shape = (list, _are_ids, "a list of episode ids")

_FIELDS: dict[str, dict[str, _Shape]] = {
    "run_start": {"schedule": _RULES},
    "issue": {"task": _TEXT, "member": _COUNT, "split": _TEXT},
    "finish": {
        "status": _TEXT,
        "action_tokens": _COUNT,
        "spans": (list, _are_spans, "a list of [version, engine, epoch, tokens]"),
    },
    "close": {"survivors": _IDS},
    "claim": {"step": _COUNT, "episodes": _IDS},
    "drop": {"episodes": _IDS},
    "commit": {"step": _COUNT, "episodes": _IDS},
    "skip": {"step": _COUNT, "episodes": _IDS},
    "publish": {"digest": _TEXT},
    "apply": {"epoch": _COUNT, "digest": _TEXT},
    "probe": {"epoch": _COUNT, "tokens": _COUNT, "alarms": (list, _anything, "a list")},
    "resume": {"step": _COUNT, "schedule": _RULES},
}
"""What each kind's payload must hold: type, further condition, both in words."""
