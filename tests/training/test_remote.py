import asyncio
from array import array
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from support.embedded import request
from trueup.errors import EngineFault, Fault, TransportFault, TrueupError
from trueup.training.clock import DECODE_STEP_S, SYNC_S, TRAIN_STEP_S, LogicalClock, run
from trueup.training.remote import PacedEngine, RemoteLearner, run_blocking_on
from trueup.types import Activity, Completion, FinishReason, GenerateRequest


def completion(session: str, finish: FinishReason = FinishReason.STOP) -> Completion:
    return Completion(
        session=session,
        token_ids=array("i", [1]),
        logps=array("f", [-1.0]),
        spans=(),
        finish=finish,
        tokens_prefilled=0,
        tokens_cached=0,
        tokens_recomputed=0,
        t_submit=0.0,
        t_start=0.0,
        t_end=0.0,
    )


@dataclass
class Process:
    """The engine's end of the wire: a turn takes as many steps as its `max_tokens`."""

    calls: list[tuple[str, float, tuple[str, ...], tuple[str, ...]]] = field(default_factory=list)
    """(method, logical time, sessions that came, sessions released)."""
    left: dict[str, int] = field(default_factory=dict)
    fault: Callable[[int], TrueupError | None] = lambda step: None
    sick: tuple[str, ...] = ()
    """Sessions whose turns fail."""
    steps: int = 0

    async def call(self, method: str, *arguments: Any) -> Any:
        now = asyncio.get_running_loop().time()
        if method == "advance":
            requests, released = arguments
            names = tuple(request.session for request in requests)
            self.calls.append((method, round(now, 6), names, tuple(released)))
            return self.advance(requests, released)
        self.calls.append((method, round(now, 6), (), ()))
        return arguments[0] if arguments else ()

    def advance(self, requests: list[GenerateRequest], released: list[str]) -> Any:
        self.steps += 1
        if error := self.fault(self.steps):
            raise error
        ended = [completion(s, FinishReason.ABORT) for s in released if self.left.pop(s, 0)]
        faults = [
            (r.session, EngineFault("not finite", field="logits").as_dict())
            for r in requests
            if r.session in self.sick
        ]
        for each in requests:
            if each.session not in self.sick:
                self.left[each.session] = each.sampling.max_tokens
        for session in list(self.left):
            self.left[session] -= 1
            if not self.left[session]:
                del self.left[session]
                ended.append(completion(session))
        return ended, faults, bool(self.left)

    def sessions(self) -> list[tuple[str, ...]]:
        return [names for method, _, names, _ in self.calls if method == "advance"]


Script = Callable[[PacedEngine, Process], Coroutine[Any, Any, None]]


def paced(script: Script, **options: Any) -> None:
    process = Process(**options)

    async def main() -> None:
        engine = PacedEngine(process, LogicalClock())
        try:
            await script(engine, process)
        finally:
            await engine.close()

    run(main(), logical=True)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_turn_of_n_steps_takes_n_grants_of_logical_time():
    async def script(engine: PacedEngine, process: Process) -> None:
        ended = await engine.generate(request("a", [1], 7))
        assert (ended.session, ended.finish) == ("a", FinishReason.STOP)
        assert now() == pytest.approx(7 * DECODE_STEP_S)
        assert process.steps == 7

    paced(script)


def test_requests_travel_with_the_next_grant_and_share_its_step():
    async def script(engine: PacedEngine, process: Process) -> None:
        async def later(name: str, wait_s: float, tokens: int) -> float:
            await asyncio.sleep(wait_s)
            await engine.generate(request(name, [1], tokens))
            return now()

        times = await asyncio.gather(
            later("a", 0.0, 5), later("b", 0.0, 2), later("c", 2.5 * DECODE_STEP_S, 1)
        )
        assert process.sessions() == [("a", "b"), (), (), ("c",), ()]
        expected = [5 * DECODE_STEP_S, 2 * DECODE_STEP_S, 4 * DECODE_STEP_S]
        assert list(times) == pytest.approx(expected)

    paced(script)


def test_an_engine_without_work_is_granted_nothing():
    async def script(engine: PacedEngine, process: Process) -> None:
        await engine.generate(request("a", [1], 2))
        await asyncio.sleep(100)
        assert process.steps == 2
        await engine.generate(request("b", [1], 1))
        assert process.steps == 3
        assert now() == pytest.approx(100 + 3 * DECODE_STEP_S)

    paced(script)


def test_nothing_is_decoded_while_weights_load():
    async def script(engine: PacedEngine, process: Process) -> None:
        turn = asyncio.create_task(engine.generate(request("a", [1], 4)))
        await asyncio.sleep(1.5 * DECODE_STEP_S)
        assert await engine.load("weights") == "weights"
        loaded_at = now()
        await turn
        methods = [method for method, *_ in process.calls]
        assert methods == ["advance", "advance", "load", "advance", "advance"]
        # the grant in progress ends first
        assert loaded_at == pytest.approx(2 * DECODE_STEP_S + SYNC_S)
        assert now() == pytest.approx(4 * DECODE_STEP_S + SYNC_S)

    paced(script)


def test_a_release_takes_effect_with_the_next_grant():
    async def script(engine: PacedEngine, process: Process) -> None:
        turn = asyncio.create_task(engine.generate(request("a", [1], 1000)))
        await asyncio.sleep(2.5 * DECODE_STEP_S)
        await engine.release("a")
        assert (await turn).finish is FinishReason.ABORT
        assert [released for *_, released in process.calls] == [(), (), (), ("a",)]

    paced(script)


def test_a_turn_that_failed_fails_alone():
    async def script(engine: PacedEngine, process: Process) -> None:
        sick, well = await asyncio.gather(
            engine.generate(request("sick", [1], 3)),
            engine.generate(request("well", [1], 3)),
            return_exceptions=True,
        )
        assert type(sick) is EngineFault
        assert (sick.message, sick.field) == ("not finite", "logits")
        assert well.session == "well"

    paced(script, sick=("sick",))


@pytest.mark.parametrize("error", [EngineFault("engine-0 is gone"), Fault("a bug in advance")])
def test_an_engine_that_is_lost_fails_every_turn_that_waits_and_every_later_one(error: Fault):
    async def script(engine: PacedEngine, process: Process) -> None:
        turns = [engine.generate(request(name, [1], 9)) for name in "ab"]
        for found in await asyncio.gather(*turns, return_exceptions=True):
            assert found is error
        with pytest.raises(type(error)):
            await asyncio.wait_for(engine.generate(request("c", [1], 9)), 1000)
        await engine.release("a")

    paced(script, fault=lambda step: error if step == 3 else None)


def test_what_an_engine_did_is_one_stretch():
    stretches = (
        Activity(t0=1.0, t1=2.0, tokens_decoded=3, tokens_prefilled=5, steps=2),
        Activity(t0=4.0, t1=6.0, tokens_decoded=4, tokens_prefilled=0, steps=1),
    )

    class Busy(Process):
        async def call(self, method: str, *arguments: Any) -> Any:
            return stretches if method == "activity" else ()

    async def main() -> None:
        whole = Activity(t0=1.0, t1=6.0, tokens_decoded=7, tokens_prefilled=5, steps=3)
        assert await PacedEngine(Busy(), LogicalClock()).activity() == [whole]
        assert await PacedEngine(Process(), LogicalClock()).activity() == []

    run(main(), logical=True)


def test_the_learner_takes_its_share_of_logical_time():
    async def main() -> None:
        learner = RemoteLearner(Process(), LogicalClock())
        await learner.publish()
        assert now() == pytest.approx(SYNC_S)
        await learner.update(0, (), ())
        assert now() == pytest.approx(SYNC_S + TRAIN_STEP_S)
        await learner.record(0, ())
        await learner.retire(0)
        assert now() == pytest.approx(SYNC_S + TRAIN_STEP_S)

    run(main(), logical=True)


def test_what_the_learner_raised_is_raised():
    class Broken(Process):
        async def call(self, method: str, *arguments: Any) -> Any:
            raise TransportFault(field="tensor w", rule="whole", value="half")

    async def main() -> None:
        with pytest.raises(TransportFault, match="tensor w"):
            await RemoteLearner(Broken(), LogicalClock()).update(0, (), ())

    run(main(), logical=True)


def test_blocking_calls_of_a_world_take_no_logical_time():
    async def main() -> None:
        run_blocking = run_blocking_on(LogicalClock())
        assert await run_blocking(lambda: 6 * 7) == 42
        with pytest.raises(EngineFault):
            await run_blocking(fail)
        assert now() == 0.0

    def fail() -> None:
        raise EngineFault("?")

    run(main(), logical=True)
