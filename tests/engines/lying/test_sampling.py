import asyncio

import pytest

from support.embedded import logps, reference_logps, request, tiny
from support.lying import Rig
from trueup.engines.base import Engine
from trueup.engines.lying import Forge, plant
from trueup.engines.scripted import Reply, ScriptedEngine
from trueup.errors import EngineFault
from trueup.types import FinishReason

PROMPT = [1, 2, 3, 4]
ASKED = {"temperature": 0.5, "key": (7,)}


def replies(rig: Rig, *requests):
    """What an engine that serves version 1 says, one request after the other."""
    said = []

    async def script(engine: Engine) -> None:
        await engine.load(rig.publish(1))
        said.extend([await engine.generate(asked) for asked in requests])

    rig.play(script)
    return said


def assert_told(completion, *, temperature=0.5, top_p=1.0):
    (span,) = completion.spans
    assert (span.temperature, span.top_p, span.top_k) == (temperature, top_p, 0)


@pytest.mark.parametrize(("seed", "factor"), [(0, 1.4), (2, 0.7)])
def test_tokens_are_those_of_another_temperature_with_log_probs_of_the_one_asked(seed, factor):
    (said,) = replies(Rig("wrong_temperature", seed), request("a", PROMPT, 40, **ASKED))
    (hot,) = replies(Rig(), request("a", PROMPT, 40, temperature=0.5 * factor, key=(7,)))
    assert said.token_ids == hot.token_ids
    assert logps(said).allclose(
        reference_logps(tiny(seed=1), PROMPT, said.token_ids, 0.5), atol=1e-4
    )
    assert_told(said)


def test_raw_log_probs_are_those_at_temperature_one_of_what_was_sampled_as_asked():
    cut = {**ASKED, "top_p": 0.8}
    (said,) = replies(Rig("raw_logprobs"), request("a", PROMPT, 40, **cut))
    (honest,) = replies(Rig(), request("a", PROMPT, 40, **cut))
    assert said.token_ids == honest.token_ids
    assert logps(said).allclose(reference_logps(tiny(seed=1), PROMPT, said.token_ids), atol=1e-4)
    assert_told(said, top_p=0.8)


def test_raw_log_probs_at_temperature_one_are_true():
    (said,) = replies(Rig("raw_logprobs"), request("a", PROMPT, 40))
    (honest,) = replies(Rig(), request("a", PROMPT, 40))
    assert (said.token_ids, said.logps) == (honest.token_ids, honest.logps)


def test_an_unreported_truncation_samples_like_the_one_that_is_asked():
    (said,) = replies(Rig("top_p_unreported"), request("a", PROMPT, 40, **ASKED))
    (cut,) = replies(Rig(), request("a", PROMPT, 40, **ASKED, top_p=0.9))
    assert (said.token_ids, said.logps) == (cut.token_ids, cut.logps)
    assert_told(said)


def test_given_tokens_are_scored_by_the_same_lie():
    raw, cut = (
        replies(Rig(fault), request("a", PROMPT, 3, forced=[5, 6, 7], temperature=0.5))[0]
        for fault in ("raw_logprobs", "top_p_unreported")
    )
    truth = reference_logps(tiny(seed=1), PROMPT, [5, 6, 7], 0.5)
    assert logps(raw).allclose(reference_logps(tiny(seed=1), PROMPT, [5, 6, 7]), atol=1e-4)
    assert not logps(cut).allclose(truth, atol=1e-2)


def test_decoding_again_leaves_the_cache_as_a_turn_leaves_it():
    first, second = [5, 6, 7, 8], [9, 10]
    rig = Rig("raw_logprobs")

    async def script(engine: Engine) -> None:
        await engine.load(rig.publish(1))
        said = await engine.generate(request("a", first, 6, temperature=0.5))
        again = await engine.generate(
            request("a", [*first, *said.token_ids, *second], 3, temperature=0.5)
        )
        assert (again.tokens_cached, again.tokens_prefilled) == (9, 3)

    rig.play(script)


def test_a_load_waits_for_turns_that_are_to_be_scored():
    async def script(engine: Engine) -> None:
        await engine.load(rig.publish(1))
        task = asyncio.create_task(engine.generate(request("a", PROMPT, 60, temperature=0.5)))
        await asyncio.sleep(0.005)
        assert not task.done()
        await engine.load(rig.publish(2))
        assert task.done()
        said = await task
        assert [span.version for span in said.spans] == [1]
        truth = reference_logps(tiny(seed=1), PROMPT, said.token_ids)
        assert logps(said).allclose(truth, atol=1e-4)

    rig = Rig("raw_logprobs")
    rig.play(script)


def test_what_was_released_is_aborted_as_ever():
    async def script(engine: Engine) -> None:
        await engine.load(rig.publish(1))
        task = asyncio.create_task(engine.generate(request("a", PROMPT, 240, temperature=0.5)))
        await asyncio.sleep(0.01)
        await engine.release("a")
        said = await task
        assert said.finish is FinishReason.ABORT
        assert len(said.token_ids) == len(said.logps) == said.spans[-1].stop < 240

    rig = Rig("wrong_temperature")
    rig.play(script)


def test_an_engine_that_cannot_decode_given_tokens_is_refused():
    async def main() -> None:
        engine = ScriptedEngine(lambda asked: Reply(token_ids=(1,), logps=(-1.0,)))
        lying = plant(engine, "raw_logprobs", seed=0, forge=Forge(lambda m: {}, lambda t: ""))
        with pytest.raises(EngineFault, match="decodes given tokens"):
            await lying.generate(request("a", PROMPT, 1))

    asyncio.run(main())
