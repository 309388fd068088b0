"""Every error that trueup raises, as one tree.

TrueupError
├── UsageError                 the user can mend it; nothing has started (exit code 2)
│   ├── ConfigError            a key or value of the configuration
│   ├── RunDirectoryError      a run directory that is in use, foreign or unreadable
│   ├── SandboxUnavailable     no backend can isolate model-written code here
│   └── CheckpointError        a checkpoint or model directory that does not verify
├── DataError                  a record that breaks its schema; refused at the boundary
└── Fault                      a part of a running system failed (exit code 3)
    ├── EngineFault            an inference engine died, stalled or returned garbage
    ├── TransportFault         weights did not arrive whole
    ├── EnvironmentFault       an environment worker or sandbox failed
    ├── GraderFault            no trustworthy verdict could be had
    └── TrainerFault           the trainer cannot go on

An episode that fails is data (`types.Failure`), not an exception: these classes are for boundaries.
"""

from __future__ import annotations

from typing import Any


class TrueupError(Exception):
    """Base of all errors: says which field broke which rule with which value.

    Args:
        message: The whole sentence; built from the parts when empty.
        field: Dotted name of what was wrong.
        rule: What it must be.
        value: What it was.
    """

    kind = "error"
    exit_code = 1

    def __init__(
        self, message: str = "", *, field: str = "", rule: str = "", value: Any = None
    ) -> None:
        """Build the sentence "<field> must be <rule>, got <value>" unless one is given."""
        self.field = field
        self.rule = rule
        self.value = value
        self.message = message or f"{field} must be {rule}, got {value!r}"
        super().__init__(self.message)

    def as_dict(self) -> dict[str, Any]:
        """The error as the JSON object that every command prints under `error`."""
        value = self.value
        if not isinstance(value, str | int | float | bool | None):
            value = repr(value)
        return {
            "kind": self.kind,
            "field": self.field,
            "rule": self.rule,
            "value": value,
            "message": self.message,
        }


class UsageError(TrueupError, ValueError):
    """The user can mend it and nothing has started."""

    kind = "usage"
    exit_code = 2


class ConfigError(UsageError):
    """A key or value of the configuration is wrong."""

    kind = "config"


class RunDirectoryError(UsageError):
    """A run directory is in use, foreign or unreadable."""

    kind = "run_directory"


class SandboxUnavailable(UsageError):
    """No backend can isolate model-written code on this machine."""

    kind = "sandbox"


class CheckpointError(UsageError):
    """A checkpoint or model directory does not verify."""

    kind = "checkpoint"


class DataError(TrueupError, ValueError):
    """A record breaks its schema and is refused at the boundary."""

    kind = "data"
    exit_code = 3


class Fault(TrueupError, RuntimeError):
    """A part of a running system failed."""

    kind = "fault"
    exit_code = 3


class EngineFault(Fault):
    """An inference engine died, stalled or returned garbage."""

    kind = "engine"


class TransportFault(Fault):
    """Weights did not arrive whole."""

    kind = "transport"


class EnvironmentFault(Fault):
    """An environment worker or a sandbox failed: infrastructure, never reward 0."""

    kind = "environment"


class GraderFault(Fault):
    """No trustworthy verdict could be had: masked and counted, never reward 0."""

    kind = "grader"


class TrainerFault(Fault):
    """The trainer cannot go on."""

    kind = "trainer"


def from_dict(record: dict[str, Any]) -> TrueupError:
    """Rebuild an error that crossed a process boundary as `as_dict`."""
    for cls in _by_kind():
        if cls.kind == record.get("kind"):
            return cls(
                record["message"],
                field=record["field"],
                rule=record["rule"],
                value=record["value"],
            )
    return Fault(str(record.get("message", record)))


def _by_kind() -> list[type[TrueupError]]:
    found: list[type[TrueupError]] = []
    stack: list[type[TrueupError]] = [TrueupError]
    while stack:
        cls = stack.pop()
        found.append(cls)
        stack.extend(cls.__subclasses__())
    return found
