"""An asynchronous front for blocking environments: bounded threads, a deadline, typed faults.

This is the boundary at which whatever an environment does becomes a value or a typed fault. It
injects the tool latency of a study, and it takes all time from the running loop, so that under a
loop with a logical clock and a deterministic `run_blocking` two runs are the same run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from trueup.config import LatencyConfig
from trueup.environments.base import Env, Environment, Step
from trueup.environments.grading import checked_reward
from trueup.environments.threads import DaemonThreads
from trueup.errors import EnvironmentFault, Fault, GraderFault
from trueup.types import Failure, FailureKind, Task

T = TypeVar("T")


class RunBlocking(Protocol):
    """Awaits a blocking call that runs elsewhere."""

    def __call__(self, call: Callable[[], T], /) -> Awaitable[T]:
        """Start the call; the awaitable gives its result or raises what it raised."""
        ...


class EnvWorkers:
    """The workers of one environment and what they share.

    Args:
        environment: Where attempts come from; owned from here on.
        threads: Calls that may run at once; the others wait, without using up their deadline.
        deadline_s: Seconds of the loop's clock that one call may take. It must leave room for the
            environment's own deadline and its retries: it is for what hangs in spite of those.
        latency: Log-normal tool latency to inject.
        seed: Key of the latency's noise.
        run_blocking: How blocking calls are run; by default on daemon threads.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        threads: int,
        deadline_s: float,
        latency: LatencyConfig,
        seed: int,
        run_blocking: RunBlocking | None = None,
    ) -> None:
        self.environment = environment
        self.abandoned = 0
        """Calls whose end nobody awaits any more: hung beyond the deadline, or cancelled."""
        self.close_failures = 0
        """Attempts that could not be closed; their verdicts stand."""
        self._slots = asyncio.Semaphore(threads)
        self._deadline_s = deadline_s
        self._latency = latency
        self._seed = seed
        self._run_blocking = run_blocking or DaemonThreads().run

    def worker(self, task: Task, *, seed: int, episode: str) -> EnvWorker:
        """A worker for one attempt.

        Args:
            task: What is attempted.
            seed: Seed of the attempt's world.
            episode: Key of its injected latency: equal keys wait equally long.
        """
        return EnvWorker(self, task, seed=seed, episode=episode)

    async def close(self) -> None:
        """Close the environment.

        Raises:
            EnvironmentFault: It failed to, or did not within the deadline.
        """
        await self.call(self.environment.close)

    async def call(self, blocking: Callable[[], T]) -> tuple[T, float]:
        """Run a blocking call of an environment in one of the slots.

        Returns:
            Its result and the seconds it took, without the wait for a slot.

        Raises:
            EnvironmentFault: It raised one, raised anything unexpected (`field` is `raised`) or
                hung (`timeout`; its thread is abandoned and counted).
            GraderFault: It raised one.
        """
        async with self._slots:
            clock = asyncio.get_running_loop().time
            started = clock()
            try:
                async with asyncio.timeout(self._deadline_s):
                    result = await self._run_blocking(lambda: _typed(blocking))
            except TimeoutError:
                self.abandoned += 1
                raise EnvironmentFault(
                    f"an environment's call did not return within {self._deadline_s:g} s",
                    field="timeout",
                    value=self._deadline_s,
                ) from None
            except asyncio.CancelledError:
                self.abandoned += 1
                raise
            return result, clock() - started

    def latency_s(self, episode: str, turn: int) -> float:
        """Injected latency in seconds of one turn: a function of seed, episode and turn alone."""
        if self._latency.median_s == 0:
            return 0.0
        noise = random.Random(f"{self._seed}/{episode}/{turn}")
        return noise.lognormvariate(math.log(self._latency.median_s), self._latency.sigma)


class EnvWorker:
    """One attempt, awaited. Same order of calls as `Env`; each raises what `EnvWorkers.call` does.

    After a call that hung only `close` goes through; it may then run beside the hung call.
    """

    def __init__(self, workers: EnvWorkers, task: Task, *, seed: int, episode: str) -> None:
        self._workers = workers
        self._task = task
        self._seed = seed
        self._episode = episode
        self._env: Env | None = None
        self._turn = 0
        self._lost = False

    @property
    def sandbox(self) -> str:
        """Backend that isolates the attempt; empty before its start."""
        return self._env.sandbox if self._env else ""

    async def start(self) -> str:
        """Make the attempt and give the task's text."""

        def begin() -> str:
            self._env = self._workers.environment.make(self._task, seed=self._seed)
            return self._env.start()

        text, _ = await self._call(begin)
        return text

    async def step(self, action: str) -> Step:
        """Act once; `tool_s` is the call's time by the loop's clock plus the injected latency.

        Raises:
            GraderFault: Also if the step is done with a reward that cannot be trained on, or
                rewards without being done.
        """
        env = self._started()
        step, seconds = await self._call(lambda: env.step(action))
        delay_s = self._workers.latency_s(self._episode, self._turn)
        self._turn += 1
        if delay_s:
            await asyncio.sleep(delay_s)
        if not step.done and step.reward is not None:
            raise GraderFault(field="reward", rule="None until done", value=step.reward)
        reward = checked_reward(step.reward) if step.done else None
        return dataclasses.replace(step, reward=reward, tool_s=seconds + delay_s)

    async def finish(self) -> float:
        """Grade the attempt as it stands."""
        reward, _ = await self._call(self._started().finish)
        return checked_reward(reward)

    async def close(self) -> None:
        """Free the attempt; may be called twice. A failure is counted, not raised: it is over."""
        env, self._env = self._env, None
        if env is None:
            return
        try:
            await self._workers.call(env.close)
        except Fault:
            self._workers.close_failures += 1

    async def _call(self, blocking: Callable[[], T]) -> tuple[T, float]:
        if self._lost:
            raise EnvironmentFault("an earlier call of this attempt hung", field="worker_lost")
        try:
            return await self._workers.call(blocking)
        except EnvironmentFault as fault:
            self._lost = fault.field == "timeout"
            raise

    def _started(self) -> Env:
        if self._env is None:
            raise RuntimeError("an attempt must be started and not closed for this call")
        return self._env


def failure(fault: EnvironmentFault | GraderFault) -> Failure:
    """A fault as the data of an episode: its `field` is the reason."""
    kind = FailureKind.GRADER if isinstance(fault, GraderFault) else FailureKind.ENVIRONMENT
    return Failure(kind=kind, reason=fault.field or "fault", message=fault.message)


def _typed(blocking: Callable[[], T]) -> T:
    try:
        return blocking()
    except (EnvironmentFault, GraderFault):
        raise
    except (Exception, SystemExit) as error:
        # Environments are anybody's code. Here, and only here, whatever they raise is the failure
        # of one attempt and must not end the run.
        raise EnvironmentFault(
            f"an environment raised {type(error).__name__}: {error}",
            field="raised",
            value=type(error).__name__,
        ) from error
