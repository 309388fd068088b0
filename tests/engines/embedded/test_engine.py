"""The asynchronous face: pacing, interleaving, cancellation, faults."""

import asyncio

import pytest
import torch

from support.embedded import Publisher, request, tiny
from trueup.engines.embedded.engine import EmbeddedEngine
from trueup.errors import EngineFault
from trueup.types import Completion, FinishReason


def test_paced_decodes_only_what_is_granted() -> None:
    async def main() -> None:
        publisher = Publisher()
        engine = EmbeddedEngine(publisher.core(tiny()), paced=True)
        await engine.load(publisher.publish(tiny()))
        await engine.submit(request("a", [1, 2, 3], 3))
        await engine.submit(request("b", [1, 2, 3], 2))
        await asyncio.sleep(0.01)
        assert await engine.advance(1) == []
        await asyncio.sleep(0.01)
        assert [said.session for said in await engine.advance(1)] == ["b"]
        assert [said.session for said in await engine.advance(10)] == ["a"]
        assert not engine.busy
        with pytest.raises(EngineFault, match="paced"):
            await engine.generate(request("c", [1]))
        await engine.close()

    asyncio.run(main())


def test_free_running_refuses_to_be_advanced() -> None:
    async def main() -> None:
        engine = EmbeddedEngine(Publisher().core(tiny()))
        with pytest.raises(EngineFault, match="free-running"):
            await engine.advance(1)
        with pytest.raises(EngineFault, match="free-running"):
            await engine.submit(request("a", [1]))
        await engine.close()
        await engine.close()

    asyncio.run(main())


def test_two_paced_runs_are_identical_with_loads_in_between() -> None:
    async def once() -> list[Completion]:
        publisher = Publisher()
        engine = EmbeddedEngine(publisher.core(tiny(), slots=3), paced=True)
        await engine.load(publisher.publish(tiny(seed=1)))
        ended: list[Completion] = []
        for tick in range(30):
            if tick < 8:
                await engine.submit(request(f"s{tick}", [1, 2, tick], 4 + tick, key=(tick,)))
            if tick in (5, 9):
                await engine.load(publisher.publish(tiny(seed=tick)))
            for said in await engine.advance(2):
                ended.append(said)
                await engine.release(said.session)
        await engine.close()
        return ended

    first, second = asyncio.run(once()), asyncio.run(once())
    assert len(first) == 8
    for a, b in zip(first, second, strict=True):
        assert (a.session, a.token_ids, a.logps, a.spans) == (
            b.session,
            b.token_ids,
            b.logps,
            b.spans,
        )


def test_paced_release_of_a_running_turn_comes_back_with_the_next_advance() -> None:
    async def main() -> None:
        publisher = Publisher()
        engine = EmbeddedEngine(publisher.core(tiny()), paced=True)
        await engine.load(publisher.publish(tiny()))
        await engine.submit(request("a", [1, 2, 3], 9))
        await engine.advance(2)
        await engine.release("a")
        (said,) = await engine.advance(0)
        assert (said.finish, len(said.token_ids)) == (FinishReason.ABORT, 2)
        await engine.close()

    asyncio.run(main())


def test_a_cancelled_generation_gives_its_slot_back() -> None:
    async def main() -> None:
        publisher = Publisher()
        engine = EmbeddedEngine(publisher.core(tiny(), slots=1))
        await engine.load(publisher.publish(tiny()))
        running = asyncio.create_task(engine.generate(request("a", [1, 2, 3], 200)))
        waiting = asyncio.create_task(engine.generate(request("b", [1, 2, 3], 2)))
        await asyncio.sleep(0.005)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len((await waiting).token_ids) == 2
        await engine.close()

    asyncio.run(main())


def test_non_finite_logits_fault_one_generation_and_no_other() -> None:
    async def main() -> None:
        model = tiny()
        with torch.no_grad():
            model.get_input_embeddings().weight[7] = torch.nan
        publisher = Publisher()
        engine = EmbeddedEngine(publisher.core(model))
        await engine.load(publisher.publish(model))
        bad, good = await asyncio.gather(
            engine.generate(request("bad", [1, 7], 3)),
            engine.generate(request("good", [1, 2], 3, top_k=1)),
            return_exceptions=True,
        )
        assert isinstance(bad, EngineFault)
        assert "session bad" in str(bad)
        assert isinstance(good, Completion)
        assert len(good.token_ids) == 3
        await engine.close()

    asyncio.run(main())


def test_a_step_that_raises_faults_every_generation_and_the_engine() -> None:
    async def main() -> None:
        publisher = Publisher()
        core = publisher.core(tiny())
        engine = EmbeddedEngine(core)
        await engine.load(publisher.publish(tiny()))
        core._network.close()  # as if memory had gone under it
        results = await asyncio.gather(
            *(engine.generate(request(name, [1, 2], 3)) for name in "ab"), return_exceptions=True
        )
        assert [type(result) for result in results] == [EngineFault, EngineFault]
        with pytest.raises(EngineFault, match="decoding"):
            await engine.generate(request("c", [1, 2], 3))

    asyncio.run(main())


def test_attest_is_the_digest_of_what_is_served() -> None:
    async def main() -> None:
        publisher = Publisher()
        engine = EmbeddedEngine(publisher.core(tiny()))
        with pytest.raises(EngineFault, match="empty"):
            await engine.attest()
        for seed in (1, 2):
            manifest = publisher.publish(tiny(seed=seed))
            receipt = await engine.load(manifest)
            assert await engine.attest() == manifest.digest == receipt.digest
            assert receipt.t_start <= receipt.t_staged <= receipt.t_end
        info = await engine.info()
        assert (info.kind, info.version, info.slots, info.epoch) == ("embedded", 2, 4, 3)
        await engine.close()

    asyncio.run(main())
