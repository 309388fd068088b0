import asyncio
import inspect

import torch

from support.embedded import logps, reference_logps, request
from support.lying import Rig, weights
from trueup.engines.base import Engine
from trueup.types import KVState

PROMPT = [1, 2, 3, 4, 5, 6]
OLD, NEW = 1, 2
"""Seeds of the weights of versions 1 and 2."""


@torch.no_grad()
def behind_old_prefix(prompt, sampled, cached):
    """[n] log-probs of new weights behind the first `cached` positions of old ones."""
    old, new = weights(OLD), weights(NEW)
    ids = torch.tensor([[*prompt, *sampled]])
    accepted = inspect.signature(new.forward).parameters
    name = "cache" if "cache" in accepted else "past_key_values"
    past = old(input_ids=ids[:, :cached], use_cache=True)
    logits = new(input_ids=ids[:, cached:], use_cache=True, **{name: past[name]}).logits[0]
    table = logits.double().log_softmax(-1)[:-1]
    found = table.gather(1, ids[0, cached + 1 :, None])[:, 0]
    return found[-len(sampled) :]


def test_kept_keys_are_told_as_recomputed_and_are_the_old_ones():
    async def script(engine: Engine) -> None:
        await engine.load(rig.publish(OLD))
        task = asyncio.create_task(engine.generate(request("a", PROMPT, 200)))
        for _ in range(10):
            await asyncio.sleep(0.001)
        await engine.load(rig.publish(NEW))
        said = await task
        first, second = said.spans
        assert (second.kv, second.context_versions) == (KVState.RECOMPUTED, ())
        cached = len(PROMPT) + second.start - 1
        assert said.tokens_recomputed == cached
        tail = said.token_ids[second.start :]
        before = [*PROMPT, *said.token_ids[: second.start]]
        kept = behind_old_prefix(before, tail, cached)
        fresh = reference_logps(weights(NEW), before, tail)
        assert logps(said)[second.start :].allclose(kept, atol=1e-4)
        assert not logps(said)[second.start :].allclose(fresh, atol=1e-2)
        old = reference_logps(weights(OLD), PROMPT, said.token_ids[: first.stop])
        assert logps(said)[: first.stop].allclose(old, atol=1e-4)

    rig = Rig("kept_kv_unreported")
    rig.play(script)


def test_a_kept_cache_of_an_idle_session_is_told_as_recomputed():
    async def script(engine: Engine) -> None:
        await engine.load(rig.publish(OLD))
        first = await engine.generate(request("a", PROMPT, 3))
        await engine.load(rig.publish(NEW))
        second = await engine.generate(request("a", [*PROMPT, *first.token_ids, 7, 8], 3))
        assert [(s.version, s.kv, s.context_versions) for s in second.spans] == [
            (2, KVState.RECOMPUTED, ())
        ]
        assert (second.tokens_recomputed, second.tokens_cached) == (8, 0)

    rig = Rig("kept_kv_unreported")
    rig.play(script)


def test_a_prompt_seen_before_a_load_is_read_from_the_old_cache_afterwards():
    async def script(engine: Engine) -> None:
        await engine.load(rig.publish(OLD))
        await engine.generate(request("a", PROMPT, 3))
        await engine.release("a")
        await engine.load(rig.publish(NEW))
        for name, prompt, cached in (("b", PROMPT, 5), ("c", [9, 10, 11, 12], 0)):
            said = await engine.generate(request(name, prompt, 6))
            assert [(s.version, s.kv, s.context_versions) for s in said.spans] == [
                (2, KVState.FRESH, ())
            ]
            assert said.tokens_cached == cached
            fresh = reference_logps(weights(NEW), prompt, said.token_ids)
            expected = behind_old_prefix(prompt, said.token_ids, cached) if cached else fresh
            assert logps(said).allclose(expected, atol=1e-4)
            assert logps(said).allclose(fresh, atol=1e-2) is not bool(cached)

    rig = Rig("surviving_prefix_cache")
    rig.play(script)


def test_a_cache_that_a_session_keeps_over_a_load_is_told_as_it_is():
    async def script(engine: Engine) -> None:
        await engine.load(rig.publish(OLD))
        first = await engine.generate(request("a", PROMPT, 3))
        await engine.load(rig.publish(NEW))
        second = await engine.generate(request("a", [*PROMPT, *first.token_ids, 7, 8], 3))
        (span,) = second.spans
        assert span.kv is KVState.KEPT
        assert 1 in span.context_versions

    rig = Rig("surviving_prefix_cache")
    rig.play(script)


def test_released_sessions_make_room_for_new_ones():
    async def script(engine: Engine) -> None:
        await engine.load(rig.publish(OLD))
        for index in range(5):
            said = await engine.generate(request(f"s{index}", [10 + index, 2, 3], 2))
            assert said.session == f"s{index}"
            await engine.release(f"s{index}")

    rig = Rig("surviving_prefix_cache", slots=2)
    rig.play(script)
