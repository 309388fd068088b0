from __future__ import annotations

import pytest

from trueup.environments.bugfix import BugfixEnvironment
from trueup.environments.bugfix_source import OPERATORS, bugs, vocabulary
from trueup.environments.sandbox.base import ExecResult, Sandbox
from trueup.environments.sandbox.none import NoSandbox
from trueup.errors import ConfigError, EnvironmentFault, GraderFault
from trueup.types import Task

TASKS = list(bugs())
FIRST = TASKS[0]


@pytest.fixture
def environment() -> BugfixEnvironment:
    """Runs only patches of the five operators: nothing that needs isolation."""
    return BugfixEnvironment(NoSandbox(), deadline_s=10)


class Scripted:
    kind = description = "scripted"

    def __init__(self, *, fails: bool = False) -> None:
        self._fails = fails

    def exec(self, program: str, stdin: str, *, deadline_s: float) -> ExecResult:
        if self._fails:
            raise EnvironmentFault("no more processes", field="start")
        return ExecResult(
            stdout="", stderr="", exit_code=137, timed_out=True, truncated=False, seconds=deadline_s
        )

    def close(self) -> None:
        pass


def test_each_operator_mends_exactly_the_six_tasks_it_belongs_to(isolating: Sandbox) -> None:
    environment = BugfixEnvironment(isolating, deadline_s=10)
    passed: dict[str, list[Task]] = {operator: [] for operator in OPERATORS}
    for task in TASKS:
        for operator in OPERATORS:
            env = environment.make(task, seed=0)
            env.start()
            step = env.step(f"patch {operator}")
            assert step.counters == {"patches": 1, "sandbox_runs": 1}
            if step.reward == 1.0:
                passed[operator].append(task)
    assert {operator: len(tasks) for operator, tasks in passed.items()} == dict.fromkeys(
        OPERATORS, 6
    )
    for operator, tasks in passed.items():
        assert all(environment.solution(task) == f"patch {operator}" for task in tasks)
    # The 150 verdicts are known now: as they stand all 30 fail, and the oracle mends all 30.
    for task in TASKS:
        unfinished = environment.make(task, seed=0)
        unfinished.start()
        assert unfinished.finish() == 0.0
        env = environment.make(task, seed=0)
        env.start()
        step = env.step(environment.solution(task))
        assert (step.reward, step.tool_status) == (1.0, "cached")
        assert step.counters == {"patches": 1, "verdict_cache_hits": 1}


def test_episode_of_reading_and_patching(environment: BugfixEnvironment) -> None:
    env = environment.make(FIRST, seed=0)
    assert env.sandbox == "none"
    assert env.start() == "fix clamp"
    read = env.step("read")
    assert read.observation == "# return the sum of x and y def clamp ( x , y ) : return x - y"
    assert (read.done, read.reward, read.tool, read.counters) == (False, None, "read", {"reads": 1})
    patch = env.step("patch +")
    assert (patch.done, patch.reward, patch.tool, patch.observation) == (True, 1.0, "patch", "")
    assert patch.tool_s > 0


@pytest.mark.parametrize(
    "action", ["", "patch", "patch **", "read read", "patch + +", "PATCH +", "fix", "patch\u00a0x"]
)
def test_anything_else_is_an_error_of_the_agents_and_the_episode_goes_on(
    environment: BugfixEnvironment, action: str
) -> None:
    env = environment.make(FIRST, seed=0)
    env.start()
    step = env.step(action)
    assert step.observation == "error : unknown action"
    assert (step.done, step.tool_status, step.counters) == (False, "error", {"invalid": 1})
    assert env.step("patch -").reward == 0.0


def test_all_text_is_of_the_vocabulary(environment: BugfixEnvironment) -> None:
    words = set(vocabulary())
    for task in TASKS:
        env = environment.make(task, seed=0)
        shown = [env.start(), env.step("read").observation, env.step("?").observation]
        shown.append(environment.solution(task))
        assert {word for text in shown for word in text.split()} <= words


def test_demonstration_is_what_the_agent_would_see(environment: BugfixEnvironment) -> None:
    for task in TASKS:
        env = environment.make(task, seed=0)
        demonstration = environment.demonstration(task)
        assert demonstration.issue == env.start()
        assert demonstration.source == env.step("read").observation
        assert environment.solution(task) == f"patch {demonstration.operator}"


def test_without_the_cache_every_patch_runs() -> None:
    environment = BugfixEnvironment(NoSandbox(), deadline_s=10, verdict_cache=False)
    for _ in range(2):
        env = environment.make(FIRST, seed=0)
        env.start()
        assert env.step("patch +").counters == {"patches": 1, "sandbox_runs": 1}


def test_sandbox_failure_and_hung_grading_are_faults_and_not_rewards() -> None:
    for sandbox, fault in (
        (Scripted(fails=True), EnvironmentFault),
        (Scripted(), GraderFault),
    ):
        environment = BugfixEnvironment(sandbox, deadline_s=10)
        for act in ("patch +", None):
            env = environment.make(FIRST, seed=0)
            env.start()
            with pytest.raises(fault):
                env.step(act) if act else env.finish()


def test_foreign_tasks_and_splits_are_refused(environment: BugfixEnvironment) -> None:
    with pytest.raises(ConfigError):
        environment.make(Task(id="bugfix/clamp/9", split="train"), seed=0)
    with pytest.raises(ConfigError):
        environment.tasks("test")
