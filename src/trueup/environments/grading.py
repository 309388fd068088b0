"""Verdicts on a function that a model wrote: run it in a sandbox, judge it outside.

Only inputs enter the sandbox and only printed outputs leave it; what is expected stays with the
host, which compares type and value. The program can print what it likes: it can forge an output,
but not a verdict. Whatever it does instead of answering (raise, exit, print nothing or too much) is
a wrong answer; a run that gives nothing to judge by is a fault, never reward 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trueup.environments.sandbox.base import ExecResult, Sandbox
from trueup.errors import GraderFault

REWARD_BOUND = 1e6

_HARNESS = """import json, sys
{source}
print(json.dumps([{function}(*arguments) for arguments in json.load(sys.stdin)]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of the function and what it must return; both JSON-able."""

    arguments: tuple[Any, ...]
    expected: Any


def grade(
    sandbox: Sandbox, source: str, function: str, cases: Sequence[Case], *, deadline_s: float
) -> float:
    """1.0 if the function returns what every case expects, else 0.0.

    Args:
        sandbox: Where the source runs.
        source: Python that defines `function`; not trusted.
        function: Name to call; trusted.
        cases: Calls with their expected results.
        deadline_s: Wall time in seconds for all cases together.

    Raises:
        EnvironmentFault: The sandbox could not be started.
        GraderFault: No end within the deadline (`field` is `timeout`).
    """
    program = _HARNESS.format(source=source, function=function)
    arguments = json.dumps([case.arguments for case in cases])
    result = sandbox.exec(program, arguments, deadline_s=deadline_s)
    if result.timed_out:
        raise GraderFault(
            f"no verdict within {deadline_s:g} s", field="timeout", rule="in time", value=deadline_s
        )
    outputs = _outputs(result)
    correct = len(outputs) == len(cases) and all(
        type(output) is type(case.expected) and output == case.expected
        for output, case in zip(outputs, cases, strict=True)
    )
    return 1.0 if correct else 0.0


def checked_reward(value: object) -> float:
    """A reward that can be trained on, as a float.

    Raises:
        GraderFault: Not a real number, not finite, or beyond ±1e6 (`field` is `reward`).
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GraderFault(field="reward", rule="a number", value=value)
    if not -REWARD_BOUND <= value <= REWARD_BOUND:  # neither is NaN
        raise GraderFault(field="reward", rule=f"within ±{REWARD_BOUND:g}", value=value)
    return float(value)


def _outputs(result: ExecResult) -> list[Any]:
    """What the program answered; empty if it did not."""
    if result.exit_code != 0 or result.truncated:
        return []
    try:
        outputs = json.loads(result.stdout)
    except (ValueError, RecursionError):
        return []
    return outputs if isinstance(outputs, list) else []
