from __future__ import annotations

import asyncio
import math
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import pytest

from trueup.config import LatencyConfig
from trueup.environments.base import Step
from trueup.environments.bugfix import BugfixEnvironment
from trueup.environments.sandbox.none import NoSandbox
from trueup.environments.worker import EnvWorkers, failure
from trueup.errors import EnvironmentFault, GraderFault
from trueup.types import Failure, FailureKind, Task

T = TypeVar("T")

TASK = Task(id="scripted/0", split="train")
NO_LATENCY = LatencyConfig()


class ScriptedEnv:
    """An attempt whose step does what the test says."""

    sandbox = "none"

    def __init__(self, act: Callable[[str], Any], finish: Callable[[], Any]) -> None:
        self._act = act
        self._finish = finish
        self.closed = 0

    def start(self) -> str:
        return "begin"

    def step(self, action: str) -> Step:
        outcome = self._act(action)
        return outcome if isinstance(outcome, Step) else Step(observation=outcome, done=False)

    def finish(self) -> float:
        return self._finish()  # type: ignore[no-any-return]

    def close(self) -> None:
        self.closed += 1


class ScriptedEnvironment:
    name = "scripted"

    def __init__(
        self,
        act: Callable[[str], Any] = lambda action: action,
        finish: Callable[[], Any] = lambda: 1.0,
    ) -> None:
        self._act, self._finish = act, finish
        self.made: list[ScriptedEnv] = []
        self.seeds: list[int] = []
        self.closed = 0

    def tasks(self, split: str) -> Sequence[Task]:
        return (TASK,)

    def make(self, task: Task, *, seed: int) -> ScriptedEnv:
        self.seeds.append(seed)
        self.made.append(ScriptedEnv(self._act, self._finish))
        return self.made[-1]

    def close(self) -> None:
        self.closed += 1


def workers(environment: Any, **options: Any) -> EnvWorkers:
    settings = {"threads": 2, "deadline_s": 10.0, "latency": NO_LATENCY, "seed": 0}
    return EnvWorkers(environment, **(settings | options))


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error

    return call


class LogicalLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        select = self._selector.select

        def jump(timeout: float | None) -> Any:
            self._now += timeout or 0.0
            return select(0)

        self._selector.select = jump

    def time(self) -> float:
        return self._now


async def inline(call: Callable[[], T]) -> T:
    """A deterministic `run_blocking`."""
    return call()


def run_logically(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=LogicalLoop) as runner:
        return runner.run(main)


def test_attempt_passes_through_and_its_seed_arrives() -> None:
    environment = ScriptedEnvironment()

    async def main() -> None:
        pool = workers(environment)
        worker = pool.worker(TASK, seed=7, episode="e")
        assert worker.sandbox == ""
        assert await worker.start() == "begin"
        assert worker.sandbox == "none"
        step = await worker.step("hello")
        assert (step.observation, step.done, step.reward) == ("hello", False, None)
        assert await worker.finish() == 1.0
        await worker.close()
        await worker.close()
        await pool.close()

    asyncio.run(main())
    assert environment.seeds == [7]
    assert environment.made[0].closed == 1
    assert environment.closed == 1


@pytest.mark.parametrize(
    "error", [ValueError("bad"), KeyError("k"), TimeoutError("own"), SystemExit(3), StopIteration()]
)
def test_whatever_an_environment_raises_is_a_typed_fault(error: BaseException) -> None:
    async def main() -> None:
        worker = workers(ScriptedEnvironment(raising(error))).worker(TASK, seed=0, episode="e")
        await worker.start()
        with pytest.raises(EnvironmentFault, match=type(error).__name__) as caught:
            await worker.step("x")
        assert caught.value.field == "raised"
        assert caught.value.__cause__ is error
        assert await worker.finish() == 1.0  # its thread is sound

    asyncio.run(main())


@pytest.mark.parametrize(
    "fault", [EnvironmentFault("e", field="start"), GraderFault("g", field="timeout")]
)
def test_typed_faults_pass_as_they_are(fault: EnvironmentFault | GraderFault) -> None:
    async def main() -> None:
        worker = workers(ScriptedEnvironment(raising(fault))).worker(TASK, seed=0, episode="e")
        await worker.start()
        with pytest.raises(type(fault)) as caught:
            await worker.step("x")
        assert caught.value is fault

    asyncio.run(main())


def test_fault_as_data_keeps_its_kind_and_reason() -> None:
    assert failure(EnvironmentFault("no pid", field="start")) == Failure(
        kind=FailureKind.ENVIRONMENT, reason="start", message="no pid"
    )
    assert failure(GraderFault("?")) == Failure(
        kind=FailureKind.GRADER, reason="fault", message="?"
    )


@pytest.mark.parametrize("reward", [None, math.nan, 1e30, "1", True])
def test_reward_that_cannot_be_trained_on_is_a_grader_fault(reward: Any) -> None:
    async def main() -> None:
        done = Step(observation="", done=True, reward=reward)
        environment = ScriptedEnvironment(lambda action: done, lambda: reward)
        worker = workers(environment).worker(TASK, seed=0, episode="e")
        await worker.start()
        with pytest.raises(GraderFault):
            await worker.step("x")
        with pytest.raises(GraderFault):
            await worker.finish()

    asyncio.run(main())


def test_reward_before_the_end_is_a_grader_fault() -> None:
    async def main() -> None:
        early = Step(observation="", done=False, reward=1.0)
        worker = workers(ScriptedEnvironment(lambda _: early)).worker(TASK, seed=0, episode="e")
        await worker.start()
        with pytest.raises(GraderFault, match="until done"):
            await worker.step("x")

    asyncio.run(main())


def test_hung_call_is_a_fault_at_its_deadline_and_spares_the_others() -> None:
    release = threading.Event()

    def act(action: str) -> str:
        if action == "hang":
            release.wait(30)
        return action

    environment = ScriptedEnvironment(act)

    async def main() -> None:
        pool = workers(environment, threads=1, deadline_s=0.5)
        hung, sound = (pool.worker(TASK, seed=0, episode=e) for e in "ab")
        await hung.start()
        await sound.start()
        started = time.monotonic()
        with pytest.raises(EnvironmentFault) as caught:
            await hung.step("hang")
        assert 0.5 <= time.monotonic() - started < 5
        assert failure(caught.value).reason == "timeout"
        assert pool.abandoned == 1
        # Its slot is free again, and the lost attempt takes no further call.
        assert (await sound.step("x")).observation == "x"
        with pytest.raises(EnvironmentFault) as caught:
            await hung.step("x")
        assert caught.value.field == "worker_lost"
        await hung.close()
        assert environment.made[0].closed == 1
        release.set()

    asyncio.run(main())


def test_late_result_of_an_abandoned_call_disturbs_nothing() -> None:
    release = threading.Event()
    environment = ScriptedEnvironment(lambda _: str(release.wait(30)))

    async def main(*, stay: bool) -> None:
        worker = workers(environment, deadline_s=0.05).worker(TASK, seed=0, episode="e")
        await worker.start()
        with pytest.raises(EnvironmentFault):
            await worker.step("x")
        if stay:
            release.set()
            await asyncio.sleep(0.1)

    asyncio.run(main(stay=True))
    release.clear()
    asyncio.run(main(stay=False))  # the loop is closed before the call returns
    release.set()
    time.sleep(0.1)  # an exception in the call's thread would be reported as this test's failure


def test_cancelled_call_is_counted_and_frees_its_slot() -> None:
    release = threading.Event()
    environment = ScriptedEnvironment(lambda action: str(action == "x" or release.wait(30)))

    async def main() -> None:
        pool = workers(environment, threads=1)
        worker, other = (pool.worker(TASK, seed=0, episode=e) for e in "ab")
        await worker.start()
        await other.start()
        step = asyncio.create_task(worker.step("hang"))
        await asyncio.sleep(0.05)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert pool.abandoned == 1
        assert (await other.step("x")).observation == "True"
        release.set()

    asyncio.run(main())


def test_no_more_calls_run_at_once_than_there_are_threads() -> None:
    lock = threading.Lock()
    running = most = 0

    def act(action: str) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.1)
        with lock:
            running -= 1
        return action

    async def main() -> list[Step]:
        # Six calls of 0.1 s on two threads take 0.3 s: the wait is not part of a deadline.
        pool = workers(ScriptedEnvironment(act), threads=2, deadline_s=0.28)
        attempts = [pool.worker(TASK, seed=0, episode=str(i)) for i in range(6)]
        for attempt in attempts:
            await attempt.start()
        return await asyncio.gather(*(attempt.step("x") for attempt in attempts))

    steps = asyncio.run(main())
    assert most == 2
    assert all(0.1 <= step.tool_s < 0.28 for step in steps)


def test_failing_close_is_counted_and_does_not_undo_the_episode() -> None:
    environment = ScriptedEnvironment()

    async def main() -> int:
        pool = workers(environment)
        worker = pool.worker(TASK, seed=0, episode="e")
        await worker.start()
        environment.made[0].close = raising(OSError("busy"))  # type: ignore[method-assign]
        await worker.close()
        return pool.close_failures

    assert asyncio.run(main()) == 1


def test_unstarted_attempt_is_a_programmers_error() -> None:
    async def main() -> None:
        worker = workers(ScriptedEnvironment()).worker(TASK, seed=0, episode="e")
        with pytest.raises(RuntimeError, match="started") as caught:
            await worker.step("x")
        assert not isinstance(caught.value, EnvironmentFault)
        await worker.close()

    asyncio.run(main())


def test_latency_is_log_normal_and_a_function_of_seed_episode_and_turn() -> None:
    pool = workers(ScriptedEnvironment(), latency=LatencyConfig(median_s=2.0, sigma=0.5))
    logs = [math.log(pool.latency_s(f"e{i}", turn)) for i in range(1000) for turn in range(2)]
    # The noise is fixed by its seed. Were it drawn anew, the bounds would be 5 standard errors
    # (0.5/√2000 and 0.5/√4000): a false alarm in less than one of a million.
    assert statistics.fmean(logs) == pytest.approx(math.log(2), abs=0.056)
    assert statistics.stdev(logs) == pytest.approx(0.5, abs=0.04)
    assert len(set(logs)) == 2000
    again = workers(ScriptedEnvironment(), latency=LatencyConfig(median_s=2.0, sigma=0.5))
    other = workers(ScriptedEnvironment(), latency=LatencyConfig(median_s=2.0, sigma=0.5), seed=1)
    assert again.latency_s("e3", 1) == pool.latency_s("e3", 1) != other.latency_s("e3", 1)


def test_latency_is_slept_on_the_loops_clock_and_counted_as_tool_time() -> None:
    latency = LatencyConfig(median_s=100.0, sigma=1.0)

    async def main() -> tuple[list[float], list[float], float]:
        pool = workers(ScriptedEnvironment(), latency=latency, run_blocking=inline)
        worker = pool.worker(TASK, seed=0, episode="e")
        await worker.start()
        tool = [(await worker.step("x")).tool_s for _ in range(3)]
        expected = [pool.latency_s("e", turn) for turn in range(3)]
        return tool, expected, asyncio.get_running_loop().time()

    started = time.monotonic()
    tool, expected, now = run_logically(main())
    assert tool == expected
    assert now == pytest.approx(sum(expected), abs=1e-9)
    assert time.monotonic() - started < 5
    assert run_logically(main()) == (tool, expected, now)


def test_deadline_is_of_the_loops_clock() -> None:
    async def never(call: Callable[[], T]) -> T:
        await asyncio.sleep(1e6)
        return call()

    async def main() -> float:
        pool = workers(ScriptedEnvironment(), deadline_s=3600.0, run_blocking=never)
        with pytest.raises(EnvironmentFault):
            await pool.worker(TASK, seed=0, episode="e").start()
        return asyncio.get_running_loop().time()

    assert run_logically(main()) == pytest.approx(3600.0)


def test_bugfix_episodes_under_a_logical_clock_are_the_same_twice() -> None:
    async def main() -> list[tuple[float | None, float, str]]:
        environment = BugfixEnvironment(NoSandbox(), deadline_s=10)
        pool = workers(
            environment, latency=LatencyConfig(median_s=1.0, sigma=1.0), run_blocking=inline
        )

        async def attempt(i: int) -> tuple[float | None, float, str]:
            task = environment.tasks("train")[i % 2]
            worker = pool.worker(task, seed=i, episode=f"e{i}")
            await worker.start()
            await worker.step("read")
            step = await worker.step(environment.solution(task))
            await worker.close()
            return step.reward, step.tool_s, step.tool_status

        played: list[Awaitable[tuple[float | None, float, str]]] = [attempt(i) for i in range(4)]
        return await asyncio.gather(*played)

    once = run_logically(main())
    assert once == run_logically(main())
    assert [reward for reward, _, _ in once] == [1.0] * 4
    assert sorted(status for _, _, status in once) == ["cached", "cached", "ok", "ok"]
