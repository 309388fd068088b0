import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.embedded import Publisher, logps, reference_logps, request, tiny
from trueup.config import EngineConfig
from trueup.engines.batching.build import build
from trueup.engines.batching.engine import BatchingEngine
from trueup.errors import ConfigError, EngineFault, TransportFault
from trueup.sync.digest import digest
from trueup.types import FinishReason, KVState

PROMPT = [1, 2, 3, 4]


def engine(model: Any, publisher: Publisher, **options: Any) -> BatchingEngine:
    settings = {"slots": 4, "fetch": publisher.transport.fetch, "digest": digest} | options
    return BatchingEngine(model, engine_id="e", **settings)


def play(
    script: Callable[[BatchingEngine, Publisher], Awaitable[None]],
    *,
    model: Any = None,
    **options: Any,
) -> None:
    """Run a script on an engine that serves `tiny(seed=1)`."""

    async def main() -> None:
        publisher = Publisher()
        built = engine(tiny() if model is None else model, publisher, **options)
        await built.load(publisher.publish(tiny(seed=1)))
        await script(built, publisher)
        await built.close()

    asyncio.run(main())


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probs_are_those_of_a_full_forward_at_the_temperature(temperature: float) -> None:
    async def script(engine: BatchingEngine, _: Publisher) -> None:
        turns = await asyncio.gather(
            *(
                engine.generate(request(f"s{i}", PROMPT[: i + 1], 20, temperature=temperature))
                for i in range(3)
            )
        )
        for i, said in enumerate(turns):
            expected = reference_logps(
                tiny(seed=1), PROMPT[: i + 1], said.token_ids.tolist(), temperature
            )
            assert logps(said) == pytest.approx(expected, abs=2e-5)

    play(script)


def test_prompts_that_are_computed_in_parts_change_no_log_prob() -> None:
    async def script(engine: BatchingEngine, _: Publisher) -> None:
        # One forward takes 512 tokens: these 4 prompts do not fit into it.
        prompts = [[(7 * i + j) % 40 for j in range(200)] for i in range(4)]
        turns = await asyncio.gather(
            *(engine.generate(request(f"s{i}", ids, 3)) for i, ids in enumerate(prompts))
        )
        for ids, said in zip(prompts, turns, strict=True):
            expected = reference_logps(tiny(seed=1), ids, said.token_ids.tolist())
            assert logps(said) == pytest.approx(expected, abs=2e-5)
        assert sum(a.tokens_prefilled for a in await engine.activity()) == 800

    play(script)


def test_log_probs_behind_a_truncated_support_are_renormalised_on_it() -> None:
    async def script(engine: BatchingEngine, _: Publisher) -> None:
        said = await engine.generate(request("a", PROMPT, 1, top_k=5))
        with torch.no_grad():
            logits = tiny(seed=1)(input_ids=torch.tensor([PROMPT])).logits[0, -1].double()
        kept = logits.topk(5)
        assert said.token_ids[0] in kept.indices.tolist()
        expected = logits[said.token_ids[0]] - kept.values.logsumexp(0)
        assert said.logps[0] == pytest.approx(float(expected), abs=1e-5)
        outside = int(logits.argmin())
        forced = await engine.generate(request("a", PROMPT, 1, top_k=5, forced=[outside]))
        assert forced.logps[0] == -math.inf

    play(script)


def test_tokens_after_a_swap_are_those_of_the_new_weights_over_recomputed_keys() -> None:
    async def script(engine: BatchingEngine, publisher: Publisher) -> None:
        task = asyncio.create_task(engine.generate(request("a", PROMPT, 200)))
        while not (await engine.activity()):
            await asyncio.sleep(0.005)
        receipt = await engine.load(publisher.publish(tiny(seed=2)))
        said = await task
        old, new = said.spans
        ids = said.token_ids.tolist()
        before = reference_logps(tiny(seed=1), PROMPT, ids)
        after = reference_logps(tiny(seed=2), PROMPT, ids)
        assert logps(said)[: old.stop] == pytest.approx(before[: old.stop], abs=3e-5)
        assert logps(said)[new.start :] == pytest.approx(after[new.start :], abs=3e-5)
        assert (new.kv, receipt.version) == (KVState.RECOMPUTED, 2)
        assert receipt.pause_s > 0

    play(script)


def test_kept_keys_and_values_are_said_to_be_kept_and_make_a_hybrid_policy() -> None:
    async def script(engine: BatchingEngine, publisher: Publisher) -> None:
        task = asyncio.create_task(engine.generate(request("a", PROMPT, 200)))
        for seed in (2, 3):
            await engine.activity()
            while not (await engine.activity()):
                await asyncio.sleep(0.005)
            receipt = await engine.load(publisher.publish(tiny(seed=seed)))
            assert receipt.tokens_recomputed == 0
        said = await task
        kinds = [(s.version, s.kv, s.context_versions) for s in said.spans]
        assert kinds == [
            (1, KVState.FRESH, ()),
            (2, KVState.KEPT, (1,)),
            (3, KVState.KEPT, (1, 2)),
        ]
        assert said.tokens_recomputed == 0
        full = reference_logps(tiny(seed=2), PROMPT, said.token_ids.tolist())
        middle = slice(said.spans[1].start, said.spans[1].stop)
        # Of the new weights alone these log-probs would be those of a full forward.
        assert float((logps(said)[middle] - full[middle]).abs().mean()) > 0.01

    play(script, keep=True)


def test_more_turns_than_slots_wait_and_all_are_served() -> None:
    async def script(engine: BatchingEngine, _: Publisher) -> None:
        turns = await asyncio.gather(
            *(engine.generate(request(f"s{i}", PROMPT, 5, key=(i,))) for i in range(11))
        )
        assert [len(said.token_ids) for said in turns] == [5] * 11

    play(script)


def test_turns_are_admitted_only_as_the_cache_can_hold_them_to_their_end() -> None:
    async def script(engine: BatchingEngine, _: Publisher) -> None:
        # The cache has 4 blocks of 32 tokens, which one of these turns may fill.
        turns = await asyncio.gather(
            *(engine.generate(request(f"s{i}", PROMPT, 110, key=(i,))) for i in range(3))
        )
        assert all(len(said.token_ids) == 110 for said in turns)
        # One token per step: never two turns at once, though there are two slots.
        assert sum(a.steps for a in await engine.activity()) == 330

    play(script, slots=2, tokens_per_slot=64)


def test_a_turn_that_can_never_fit_is_refused() -> None:
    async def script(engine: BatchingEngine, _: Publisher) -> None:
        with pytest.raises(EngineFault, match="between 1 and 256 tokens"):
            await engine.generate(request("a", PROMPT, 253))
        with pytest.raises(EngineFault, match="forced_ids"):
            await engine.generate(request("a", PROMPT, 2, forced=[1]))

    play(script)


def test_a_turn_beyond_the_whole_cache_is_refused() -> None:
    async def script(engine: BatchingEngine, _: Publisher) -> None:
        with pytest.raises(EngineFault, match="between 1 and 128 tokens"):
            await engine.generate(request("a", PROMPT, 125))

    play(script, tokens_per_slot=32)


def test_garbage_logits_fail_the_turn_and_not_the_engine() -> None:
    async def script(engine: BatchingEngine, publisher: Publisher) -> None:
        broken = tiny(seed=2)
        with torch.no_grad():
            broken.lm_head.weight[3] = math.nan
        await engine.load(publisher.publish(broken))
        with pytest.raises(EngineFault, match="finite"):
            await engine.generate(request("a", PROMPT))
        await engine.load(publisher.publish(tiny(seed=1)))
        said = await engine.generate(request("a", PROMPT))
        assert said.finish is FinishReason.LENGTH

    play(script)


def test_a_step_that_hangs_is_a_fault_within_the_deadline() -> None:
    go, model = threading.Event(), tiny()
    model.register_forward_pre_hook(lambda *_: go.wait() and None)

    async def script(engine: BatchingEngine, publisher: Publisher) -> None:
        with pytest.raises(EngineFault, match=r"a step within 0\.5 s"):
            await engine.generate(request("a", PROMPT))
        with pytest.raises(EngineFault, match=r"a step within 0\.5 s"):
            await engine.load(publisher.publish(tiny(seed=2)))
        go.set()

    play(script, model=model, stall_s=0.5)


def test_a_pause_that_does_not_begin_is_a_fault_within_the_deadline() -> None:
    go, model = threading.Event(), tiny()
    model.register_forward_pre_hook(lambda *_: go.wait() and None)

    async def script(engine: BatchingEngine, publisher: Publisher) -> None:
        task = asyncio.create_task(engine.generate(request("a", PROMPT)))
        await asyncio.sleep(0.05)
        with pytest.raises(EngineFault, match=r"paused within 0\.3 s"):
            await engine.load(publisher.publish(tiny(seed=2)))
        assert (await engine.info()).version == 1
        go.set()
        await asyncio.wait([task])

    play(script, model=model, stall_s=0.3)


def test_a_forward_that_raises_ends_the_engine_with_a_fault() -> None:
    model = tiny()

    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    async def script(engine: BatchingEngine, _: Publisher) -> None:
        model.register_forward_pre_hook(fail)
        with pytest.raises(EngineFault, match="out of luck"):
            await engine.generate(request("a", PROMPT))
        with pytest.raises(EngineFault, match="stopped"):
            await engine.generate(request("b", PROMPT))

    play(script, model=model)


def test_memory_that_is_not_what_was_verified_ends_the_engine() -> None:
    calls: list[str] = []

    def forgetful(tensors: Mapping[str, Tensor]) -> str:
        calls.append(digest(tensors))
        return calls[-1] if len(calls) != 4 else "0" * 16  # the memory after the second load

    async def script(engine: BatchingEngine, publisher: Publisher) -> None:
        with pytest.raises(EngineFault, match="digest of engine memory"):
            await engine.load(publisher.publish(tiny(seed=2)))
        with pytest.raises(EngineFault, match="digest of engine memory"):
            await engine.generate(request("a", PROMPT))

    play(script, digest=forgetful)


def test_a_foreign_version_is_refused_before_the_batch_is_paused() -> None:
    async def script(engine: BatchingEngine, publisher: Publisher) -> None:
        with pytest.raises(TransportFault, match="shape"):
            await engine.load(publisher.publish(tiny(seed=2, intermediate_size=56)))
        assert (await engine.info()).version == 1

    play(script)


def test_turns_that_end_before_their_first_token_have_no_span() -> None:
    async def script(engine: BatchingEngine, _: Publisher) -> None:
        running = asyncio.create_task(engine.generate(request("a", PROMPT, 200)))
        queued = asyncio.create_task(engine.generate(request("b", PROMPT, 3)))
        await asyncio.sleep(0)
        for session in ("b", "a"):
            await engine.release(session)
        for said in (await queued, await running):
            assert (said.finish, said.spans, list(said.token_ids)) == (FinishReason.ABORT, (), [])
        assert (await queued).tokens_prefilled == 0

    play(script, slots=1)


def test_a_cancelled_caller_frees_its_place() -> None:
    async def script(engine: BatchingEngine, _: Publisher) -> None:
        task = asyncio.create_task(engine.generate(request("a", PROMPT, 200)))
        queued = asyncio.create_task(engine.generate(request("b", PROMPT, 3)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await queued).finish is FinishReason.LENGTH
        assert len((await engine.generate(request("a", PROMPT, 2))).token_ids) == 2

    play(script, slots=1)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"quantize": "int8"}, "engine.quantize"),
        ({"float32_head": True}, "engine.float32_head"),
        ({"url": "http://127.0.0.1:1"}, "engine.url"),
        ({"paced": True}, "engine.kind"),
    ],
)
def test_settings_that_this_engine_does_not_have_are_refused(
    tmp_path: Path, options: dict[str, Any], field: str
) -> None:
    paced = options.pop("paced", False)
    with pytest.raises(ConfigError) as caught:
        build(
            EngineConfig(kind="transformers", **options),
            model=tmp_path,
            engine_id="e",
            epoch=0,
            fetch=Publisher().transport.fetch,
            digest=digest,
            paced=paced,
        )
    assert caught.value.field == field
