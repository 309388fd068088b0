from __future__ import annotations

import math

import pytest

from trueup.environments.grading import Case, checked_reward, grade
from trueup.environments.sandbox.base import ExecResult, Sandbox
from trueup.errors import EnvironmentFault, GraderFault

CASES = (
    Case(arguments=(7, 2), expected=9),
    Case(arguments=(9, 4), expected=13),
    Case(arguments=(-8, 3), expected=-5),
)

HONEST = {
    "by the operator": "def add(x, y): return x + y",
    "by another way": "def add(x, y): return sum((x, y))",
    "with braces in its text": "def add(x, y): return {'{x}': x + y}['{x}']",
}

CHEATS = {
    "exits with success": "import os; os._exit(0)",
    "exits with success when called": "import os\ndef add(x, y): os._exit(0)",
    "raises SystemExit(0)": "raise SystemExit(0)",
    "an int equal to everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def add(x, y): return Any(0)"
    ),
    "an object equal to everything": (
        "class Any:\n    def __eq__(self, other): return True\ndef add(x, y): return Any()"
    ),
    "prints a forged verdict": (
        'print(\'{"reward": 1.0, "passed": true}\')\ndef add(x, y): return 0'
    ),
    "prints a forged answer before the harness": "print([0, 0, 0])\ndef add(x, y): return 0",
    "prints a forged answer and exits": "import os\nprint([0, 0, 0], flush=True)\nos._exit(0)",
    "prints the right answer beside the harness": "print([9, 13, -5])\ndef add(x, y): return 0",
    "looks for the answer in the frames of its callers": (
        "import sys\n"
        "def add(x, y):\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        if 'expected' in frame.f_locals: return frame.f_locals['expected']\n"
        "        frame = frame.f_back\n"
        "    return 0"
    ),
    "looks for the answer in files": (
        "import glob, re\n"
        "seen = ''\n"
        "for path in glob.glob('/box/*') + glob.glob('/tmp/*') + glob.glob('/proc/*/cmdline'):\n"
        "    try: seen += open(path).read()\n"
        "    except OSError: pass\n"
        "def add(x, y): return 13 if 'expected' in seen else 0"
    ),
    "echoes its input": "import json\ndef add(*xy): return list(xy)",
    "floats": "def add(x, y): return float(x + y)",
    "strings": "def add(x, y): return str(x + y)",
    "answers nothing": "def add(x, y): return None",
    "answers not a number": "def add(x, y): return float('nan')",
    "is right once": "def add(x, y): return 9",
    "is right but for one": "def add(x, y): return abs(x + y)",
    "an extra answer": (
        "import json, sys\njson.load = lambda f: [[7, 2], [9, 4], [-8, 3], [0, 0]]\n"
        "def add(x, y): return x + y"
    ),
    "fewer answers": "import json\njson.load = lambda f: [[7, 2]]\ndef add(x, y): return x + y",
    "patches the printer": "import json\njson.dumps = lambda o: 'true'\ndef add(x, y): return 0",
    "nests too deep": (
        "import json\njson.dumps = lambda o: '[' * 100_000\ndef add(x, y): return 0"
    ),
    "a number too long to read": (
        "import json\njson.dumps = lambda o: '[' + '9' * 9000 + ']'\ndef add(x, y): return 0"
    ),
    "is right and exits with failure": (
        "import atexit, os\natexit.register(os._exit, 1)\ndef add(x, y): return x + y"
    ),
    "floods the output": "while True: print('x' * 4096)",
    "raises": "def add(x, y): raise ValueError",
    "does not define the function": "x = 1",
    "does not parse": "def add(x, y) return x + y",
    "eats all memory": "def add(x, y): return [0] * (1 << 40)",
}


@pytest.mark.parametrize("source", HONEST.values(), ids=HONEST.keys())
def test_right_function_passes(isolating: Sandbox, source: str) -> None:
    assert grade(isolating, source, "add", CASES, deadline_s=10) == 1.0


@pytest.mark.parametrize("source", CHEATS.values(), ids=CHEATS.keys())
def test_no_cheat_passes(isolating: Sandbox, source: str) -> None:
    assert grade(isolating, source, "add", CASES, deadline_s=10) == 0.0


class Scripted:
    """Answers every program alike and keeps what it was given."""

    kind = description = "scripted"

    def __init__(self, stdout: str = "", *, timed_out: bool = False) -> None:
        self._result = ExecResult(
            stdout=stdout, stderr="", exit_code=0, timed_out=timed_out, truncated=False, seconds=0
        )
        self.given = ""

    def exec(self, program: str, stdin: str, *, deadline_s: float) -> ExecResult:
        self.given += program + stdin
        return self._result

    def close(self) -> None:
        pass


def test_expected_outputs_never_enter_the_sandbox() -> None:
    sandbox = Scripted("[123456789]")
    case = Case(arguments=(1, 2), expected=123456789)
    assert grade(sandbox, "def f(a, b): return 0", "f", [case], deadline_s=1) == 1.0
    assert "[[1, 2]]" in sandbox.given
    assert "123456789" not in sandbox.given


@pytest.mark.parametrize(
    ("stdout", "reward"),
    [("[1]", 1.0), ("[true]", 0.0), ("[1.0]", 0.0), ("1", 0.0), ('{"0": 1}', 0.0), ("[1][1]", 0.0)],
)
def test_type_and_form_of_an_answer_count(stdout: str, reward: float) -> None:
    case = Case(arguments=(), expected=1)
    assert grade(Scripted(stdout), "", "f", [case], deadline_s=1) == reward


def test_hung_grading_run_is_a_fault_and_not_a_reward(isolating: Sandbox) -> None:
    with pytest.raises(GraderFault) as caught:
        grade(isolating, "while True: pass", "add", CASES, deadline_s=0.3)
    assert caught.value.field == "timeout"


def test_sandbox_that_does_not_start_is_a_fault_and_not_a_reward() -> None:
    class Broken(Scripted):
        def exec(self, program: str, stdin: str, *, deadline_s: float) -> ExecResult:
            raise EnvironmentFault("no more processes", field="start")

    with pytest.raises(EnvironmentFault):
        grade(Broken(), "", "f", CASES, deadline_s=1)


@pytest.mark.parametrize("value", [0, 1, -1, 0.5, 1e6, -1e6])
def test_real_rewards_are_floats(value: float) -> None:
    reward = checked_reward(value)
    assert type(reward) is float
    assert reward == value


@pytest.mark.parametrize(
    "value",
    [None, "1", True, math.nan, math.inf, -math.inf, 1e30, 1_000_001, 10**400, 1j, [1.0]],
    ids=lambda value: str(value)[:8],
)
def test_other_rewards_are_faults(value: object) -> None:
    with pytest.raises(GraderFault) as caught:
        checked_reward(value)
    assert caught.value.field == "reward"
