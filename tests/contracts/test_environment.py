"""What every environment must do, run over every line of the table."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from trueup.config import from_dict
from trueup.environments.base import Env, Environment
from trueup.environments.sandbox.base import ExecResult, Sandbox
from trueup.environments.sandbox.none import NoSandbox
from trueup.environments.table import ENVIRONMENTS, build
from trueup.errors import EnvironmentFault, Fault, GraderFault

ACTIONS = ("nonsense", "", "read", "\x1b[31m<b>[bold]\0")


class Dead:
    """A sandbox that never starts."""

    kind = description = "dead"

    def exec(self, program: str, stdin: str, *, deadline_s: float) -> ExecResult:
        raise EnvironmentFault("no more processes", field="start")

    def close(self) -> None:
        pass


def made(kind: str, sandbox: Sandbox) -> Environment:
    return build(from_dict({"environment": {"kind": kind}}), sandbox)


@pytest.fixture(params=sorted(ENVIRONMENTS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def environment(kind: str) -> Iterator[Environment]:
    environment = made(kind, NoSandbox())
    yield environment
    environment.close()


def played(env: Env) -> list[object]:
    """Everything an attempt shows to a fixed agent, but for its times."""
    seen: list[object] = [env.start()]
    for action in ACTIONS:
        step = env.step(action)
        seen.append((step.observation, step.done, step.reward, step.tool, step.tool_status))
        assert (step.reward is None) == (not step.done)
        if step.done:
            return seen
    return [*seen, env.finish()]


def over(env: Env) -> None:
    with pytest.raises(RuntimeError) as caught:
        env.step(ACTIONS[0])
    assert not isinstance(caught.value, Fault)


def test_name_is_that_of_the_table(kind: str, environment: Environment) -> None:
    assert environment.name == kind


def test_tasks_have_a_fixed_order_own_ids_and_disjoint_splits(
    kind: str, environment: Environment
) -> None:
    train, heldout = environment.tasks("train"), environment.tasks("heldout")
    again = made(kind, NoSandbox())
    assert list(train) == list(environment.tasks("train")) == list(again.tasks("train"))
    assert list(heldout) == list(again.tasks("heldout"))
    assert train
    assert heldout
    assert {task.split for task in train} == {"train"}
    assert {task.split for task in heldout} == {"heldout"}
    ids = [task.id for task in (*train, *heldout)]
    assert len(set(ids)) == len(ids)


def test_equal_seeds_give_equal_worlds(kind: str, environment: Environment) -> None:
    other = made(kind, NoSandbox())
    for task in environment.tasks("train")[:3]:
        one = played(environment.make(task, seed=7))
        assert one == played(environment.make(task, seed=7)) == played(other.make(task, seed=7))


def test_rewards_are_finite(environment: Environment) -> None:
    env = environment.make(environment.tasks("heldout")[0], seed=0)
    env.start()
    reward = env.finish()
    assert type(reward) is float
    assert math.isfinite(reward)


def test_attempts_are_single_use(environment: Environment) -> None:
    env = environment.make(environment.tasks("train")[0], seed=0)
    over(env)  # not started yet
    env.start()
    with pytest.raises(RuntimeError):
        env.start()
    env.finish()
    over(env)
    with pytest.raises(RuntimeError):
        env.finish()


def test_attempts_close_twice_and_then_refuse(environment: Environment) -> None:
    for begin in (False, True):
        env = environment.make(environment.tasks("train")[0], seed=0)
        if begin:
            env.start()
        env.close()
        env.close()
        over(env)
        with pytest.raises(RuntimeError):
            env.start()


def test_attempts_do_not_share_state(environment: Environment) -> None:
    task = environment.tasks("train")[0]
    one, two = environment.make(task, seed=0), environment.make(task, seed=0)
    assert one.start() == two.start()
    one.finish()
    one.close()
    assert two.step(ACTIONS[0]).observation == environment_step(environment)


def environment_step(environment: Environment) -> str:
    env = environment.make(environment.tasks("train")[0], seed=0)
    env.start()
    return env.step(ACTIONS[0]).observation


def test_attempts_record_what_isolates_them(environment: Environment) -> None:
    assert environment.make(environment.tasks("train")[0], seed=0).sandbox == "none"


def test_failure_of_the_sandbox_is_a_typed_fault_or_does_not_matter(kind: str) -> None:
    environment = made(kind, Dead())
    env = environment.make(environment.tasks("train")[0], seed=0)
    env.start()
    try:
        reward = env.finish()
    except (EnvironmentFault, GraderFault):
        reward = math.nan
    # An environment that needs no sandbox grades as it would with one.
    sound = made(kind, NoSandbox())
    reference = sound.make(sound.tasks("train")[0], seed=0)
    reference.start()
    assert math.isnan(reward) or reward == reference.finish()


def test_environment_closes_twice(kind: str) -> None:
    environment = made(kind, NoSandbox())
    environment.close()
    environment.close()
