import asyncio
import random
import threading
import time

import pytest

from trueup.errors import EngineFault
from trueup.training.clock import LogicalClock, RealClock, run


async def outside(result: object, real_s: float = 0.0) -> object:
    """Work of a thread that really takes `real_s`."""

    def work() -> object:
        time.sleep(real_s)
        return result

    return await asyncio.to_thread(work)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_logical_time_starts_at_zero_and_a_day_passes_in_no_time():
    async def main() -> tuple[float, float]:
        before = now()
        await asyncio.sleep(86_400)
        return before, now()

    started = time.monotonic()
    assert run(main(), logical=True) == (0.0, 86_400.0)
    assert time.monotonic() - started < 5


def test_logical_time_stands_still_while_something_can_happen():
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return now()

    assert run(main(), logical=True) == 0.0


def test_work_takes_the_logical_time_it_is_said_to_take_however_long_it_really_takes():
    async def main() -> list[tuple[object, float]]:
        clock = LogicalClock()
        found = []
        for real_s in (0.0, 0.03):
            result = await clock.take(outside("done", real_s), 2.5)
            found.append((result, now()))
        return found

    assert run(main(), logical=True) == [("done", 2.5), ("done", 5.0)]


def program(seed: int) -> list[tuple[str, float]]:
    """Five workers, timers and work of unpredictable real duration; the order of what happened."""
    chance = random.Random(seed)
    happened: list[tuple[str, float]] = []

    async def worker(name: str, clock: LogicalClock, waits: list[float]) -> None:
        for turn, wait in enumerate(waits):
            await clock.take(outside(None, chance.random() * 0.004), wait)
            happened.append((f"{name}/{turn}", now()))
            await asyncio.sleep(wait / 2)
            happened.append((f"{name}/{turn} slept", now()))

    async def main() -> None:
        clock = LogicalClock()
        # equal and zero durations: many results are due at the same logical moment
        waits = {f"w{i}": [float((i + turn) % 3) for turn in range(6)] for i in range(5)}
        await asyncio.gather(*(worker(name, clock, each) for name, each in waits.items()))

    run(main(), logical=True)
    return happened


def test_two_runs_see_the_same_events_in_the_same_order_whatever_really_takes_how_long():
    first = program(0)
    assert len(first) == 60
    assert [time for _, time in first] == sorted(time for _, time in first)
    assert all(program(seed) == first for seed in (1, 2, 3))


def test_results_that_are_due_together_come_in_the_order_in_which_they_were_handed_over():
    async def main() -> list[str]:
        clock, order = LogicalClock(), []

        async def take(name: str, real_s: float) -> None:
            order.append(str(await clock.take(outside(name, real_s), 1.0)))

        await asyncio.gather(take("slow", 0.05), take("quick", 0.0), take("middle", 0.02))
        return order

    assert run(main(), logical=True) == ["slow", "quick", "middle"]


def test_a_result_is_delivered_only_when_nothing_else_can_happen():
    async def main() -> list[str]:
        clock, order = LogicalClock(), []

        async def take() -> None:
            await clock.take(outside(None), 0.0)
            order.append("result")

        taking = asyncio.create_task(take())
        for turn in range(50):
            await asyncio.sleep(0)
            if turn == 10:
                time.sleep(0.05)  # the work is done by now, for certain
        order.append("busy until here")
        await taking
        return order

    assert run(main(), logical=True) == ["busy until here", "result"]


def test_time_does_not_pass_a_result_that_is_due():
    async def main() -> list[tuple[str, float]]:
        clock, order = LogicalClock(), []

        async def note(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            order.append((name, now()))

        async def take() -> None:
            await clock.take(outside(None, 0.05), 1.0)
            order.append(("work", now()))

        await asyncio.gather(note("before", 0.5), take(), note("after", 1.5))
        return order

    assert run(main(), logical=True) == [("before", 0.5), ("work", 1.0), ("after", 1.5)]


@pytest.mark.parametrize("clock", [LogicalClock(), RealClock()])
def test_what_the_work_raised_is_raised(clock: LogicalClock | RealClock):
    async def fail() -> None:
        await outside(None)
        raise EngineFault("gone", field="engine")

    async def main() -> None:
        with pytest.raises(EngineFault, match="gone"):
            await clock.take(fail(), 0.1)

    run(main(), logical=clock.logical)


@pytest.mark.parametrize("clock", [LogicalClock(), RealClock()])
def test_work_that_was_cancelled_cancels_who_waits_for_it(clock: LogicalClock | RealClock):
    async def main() -> bool:
        work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        taking = asyncio.ensure_future(clock.take(work, 0.1))
        await asyncio.sleep(0)
        work.cancel()
        await asyncio.wait([taking])
        return taking.cancelled()

    assert run(main(), logical=clock.logical)


def test_who_stops_waiting_does_not_hold_up_the_others():
    async def main() -> tuple[bool, object, float]:
        clock = LogicalClock()
        first = asyncio.ensure_future(clock.take(outside("first", 0.02), 1.0))
        second = asyncio.ensure_future(clock.take(outside("second"), 1.0))
        asyncio.get_running_loop().call_later(1.0, first.cancel)
        result = await second
        return first.cancelled(), result, now()

    assert run(main(), logical=True) == (True, "second", 1.0)


def test_a_logical_clock_refuses_a_loop_on_real_time():
    work = None

    async def main() -> None:
        nonlocal work
        work = asyncio.get_running_loop().create_future()
        with pytest.raises(AssertionError, match="LogicalEventLoop"):
            await LogicalClock().take(work, 0.0)

    run(main(), logical=False)


def test_real_work_takes_its_real_time():
    async def main() -> tuple[object, float]:
        started = now()
        result = await RealClock().take(outside("done", 0.02), 1e6)
        return result, now() - started

    result, seconds = run(main(), logical=False)
    assert result == "done"
    assert 0.02 <= seconds < 60


def test_the_end_of_a_logical_run_waits_for_the_threads_it_used():
    gate = threading.Event()

    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, gate.wait)
        threading.Timer(0.05, gate.set).start()
        # what asyncio.Runner does at the end, with its time-out since Python 3.12
        await loop.shutdown_default_executor(300.0)
        return loop.time()

    assert run(main(), logical=True) == 0.0
    assert gate.is_set()
