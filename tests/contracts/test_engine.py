"""What every engine must do, run over each of them.

vLLM, which needs an environment of its own, is run by `make test-vllm`.
"""

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import support.vllm
from support.embedded import VOCABULARY, Publisher, request, tiny
from support.openai_server import Behaviour, serving
from trueup.engines.base import Engine
from trueup.engines.batching.engine import BatchingEngine
from trueup.engines.embedded.engine import EmbeddedEngine
from trueup.engines.http import Address, JsonClient
from trueup.engines.openai.engine import OpenAIEngine
from trueup.engines.scripted import Reply, ScriptedEngine, refuse
from trueup.errors import EngineFault, TransportFault
from trueup.sync.digest import digest
from trueup.types import Completion, FinishReason, GenerateRequest, KVState, WeightManifest

STOPS = tuple(range(0, VOCABULARY, 2))


@dataclass
class Rig:
    engine: Engine
    good: list[WeightManifest]
    """Versions 1 and 2."""
    broken: WeightManifest
    """Version 3, which does not arrive whole."""
    partial: bool = True
    """An aborted turn comes back with what was sampled of it."""
    stack: ExitStack = field(default_factory=ExitStack)
    """What the engine needs beside itself."""


def embedded() -> Rig:
    publisher = Publisher()
    engine = EmbeddedEngine(publisher.core(tiny(), slots=8))
    good = [publisher.publish(tiny(seed=seed)) for seed in (1, 2)]
    broken = publisher.publish(tiny(seed=3))
    return Rig(engine, good, replace(broken, digest="0" * 16))


def batching() -> Rig:
    publisher = Publisher()
    engine = BatchingEngine(
        tiny(), engine_id="e", epoch=3, slots=8, fetch=publisher.transport.fetch, digest=digest
    )
    good = [publisher.publish(tiny(seed=seed)) for seed in (1, 2)]
    broken = publisher.publish(tiny(seed=3))
    return Rig(engine, good, replace(broken, digest="0" * 16))


def scripted() -> Rig:
    def reply(asked: GenerateRequest) -> Reply:
        rng = random.Random(repr(asked.sampling.key))
        n = asked.sampling.max_tokens
        ids = [rng.randrange(VOCABULARY) for _ in range(n)]
        return Reply(token_ids=ids, logps=[-rng.random() for _ in ids], token_s=0.0002)

    engine = ScriptedEngine(reply, verify=refuse(3))
    versions = manifests()
    return Rig(engine, versions[:2], versions[2])


def manifests() -> list[WeightManifest]:
    """Of versions 1 to 3, without tensors."""
    return [
        WeightManifest(
            version=version,
            transport="none",
            location="",
            digest=f"{version:016x}",
            tensors=(),
            nbytes=0,
            n_changed=0,
        )
        for version in (1, 2, 3)
    ]


def openai() -> Rig:
    stack = ExitStack()
    url = stack.enter_context(serving(Behaviour(spread=1.5, token_s=0.0002)))
    engine = OpenAIEngine(
        JsonClient(Address.parse(url)),
        engine_id="e",
        epoch=3,
        slots=8,
        precision="float32",
        vocab_size=VOCABULARY,
        version=1,
    )
    versions = manifests()
    return Rig(engine, versions[:2], versions[2], partial=False, stack=stack)


def vllm() -> Rig:
    running = support.vllm.server(slots=8)
    root = Path(tempfile.mkdtemp(prefix="trueup-test-run-"))
    versions = support.vllm.published(root, [support.vllm.model(seed) for seed in (1, 2, 3)])
    return Rig(support.vllm.engine(running), versions[:2], support.vllm.torn(versions[2]))


@pytest.fixture(
    params=[embedded, batching, scripted, openai, vllm],
    ids=lambda build: build.__name__,
)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    built: Rig = request.param()
    with built.stack:
        yield built


def play(rig: Rig, script: Callable[[Engine], Awaitable[None]], *, load: bool = True) -> None:
    async def main() -> None:
        loads = (await rig.engine.info()).loads
        if not load and not loads:
            pytest.skip("this engine is never empty")
        if loads and load:
            await rig.engine.load(rig.good[0])
        await script(rig.engine)
        await rig.engine.close()

    asyncio.run(main())


async def found_again(engine: Engine, known: int) -> int:
    """Of so many known tokens, those whose keys and values an engine can still have."""
    block = (await engine.info()).cache_block
    return known // block * block if block else 0


async def until_decoding(engine: Engine) -> None:
    """Let a generation that was just started sample a few tokens: as one beside it does."""
    await asyncio.sleep(0)
    await engine.generate(request("beside", [7], 4))


def test_empty_engine_refuses_to_generate(rig: Rig) -> None:
    async def script(engine: Engine) -> None:
        with pytest.raises(EngineFault, match="empty"):
            await engine.generate(request("a", [1, 2, 3]))

    play(rig, script, load=False)


def test_spans_cover_all_tokens_and_name_version_and_engine(rig: Rig) -> None:
    async def script(engine: Engine) -> None:
        info = await engine.info()
        said = await engine.generate(request("a", [1, 2, 3], 7, temperature=0.5))
        assert len(said.token_ids) == len(said.logps) == 7
        (span,) = said.spans
        assert (span.start, span.stop, span.version) == (0, 7, 1)
        assert (span.engine, span.epoch, span.precision) == (info.engine, info.epoch, "float32")
        assert (span.temperature, span.top_p, span.top_k) == (0.5, 1.0, 0)
        assert span.kv is KVState.FRESH
        assert said.t_submit <= said.t_start <= said.t_end

    play(rig, script)


def test_the_stop_token_is_the_last_action_token(rig: Rig) -> None:
    async def script(engine: Engine) -> None:
        said = await engine.generate(request("a", [1, 2, 3], 60, stop_ids=STOPS))
        # Half of all tokens stop: 60 without one have a chance of 2^-60, and the key is fixed.
        assert said.finish is FinishReason.STOP
        assert said.token_ids[-1] in STOPS
        assert not set(said.token_ids[:-1]) & set(STOPS)

    play(rig, script)


def test_forced_tokens_get_the_log_probs_that_sampling_them_gave(rig: Rig) -> None:
    async def script(engine: Engine) -> None:
        if not (await engine.info()).forces:
            pytest.skip("this engine only samples")
        said = await engine.generate(request("a", [1, 2, 3], 12, temperature=0.7))
        beside = engine.generate(request("b", [4, 5], 12, key=(9,)))
        forced, _ = await asyncio.gather(
            engine.generate(
                request("c", [1, 2, 3], 12, temperature=0.7, forced=said.token_ids, key=(8,))
            ),
            beside,
        )
        assert forced.token_ids == said.token_ids
        assert list(forced.logps) == pytest.approx(list(said.logps), abs=1e-5)
        assert forced.finish is FinishReason.LENGTH

    play(rig, script)


def test_max_tokens_end_a_turn_without_inventing_a_stop_token(rig: Rig) -> None:
    async def script(engine: Engine) -> None:
        first = await engine.generate(request("a", [1, 2, 3], 5))
        absent = next(token for token in range(VOCABULARY) if token not in first.token_ids)
        said = await engine.generate(request("b", [1, 2, 3], 5, stop_ids=(absent,)))
        assert said.finish is FinishReason.LENGTH
        assert said.token_ids == first.token_ids

    play(rig, script)


def test_the_same_key_gives_the_same_tokens_whatever_decodes_beside(rig: Rig) -> None:
    async def script(engine: Engine) -> None:
        alone = await engine.generate(request("a", [1, 2, 3], key=(5, 6)))
        beside = [engine.generate(request(f"b{i}", [4, 5], 20, key=(i,))) for i in range(3)]
        again, *_ = await asyncio.gather(
            engine.generate(request("c", [1, 2, 3], key=(5, 6))), *beside
        )
        other = await engine.generate(request("c", [1, 2, 3], key=(5, 7)))
        assert alone.token_ids == again.token_ids
        assert alone.token_ids != other.token_ids  # 40^-8 by chance, and the keys are fixed

    play(rig, script)


def test_a_next_turn_computes_only_its_new_tokens(rig: Rig) -> None:
    async def script(engine: Engine) -> None:
        first = await engine.generate(request("a", [1, 2, 3, 4, 5], 3))
        assert (first.tokens_prefilled, first.tokens_cached) == (5, 0)
        prompt = [1, 2, 3, 4, 5, *first.token_ids, 6, 7, 8, 9]
        second = await engine.generate(request("a", prompt, 3))
        # 5 + 3 ids are known, the last sample's keys and values are not yet computed.
        found = await found_again(engine, 7)
        assert (second.tokens_prefilled, second.tokens_cached) == (12 - found, found)
        assert second.tokens_recomputed == 0
        assert second.spans[0].kv is KVState.FRESH

    play(rig, script)


def test_a_load_splits_the_spans_of_a_running_turn(rig: Rig) -> None:
    async def script(engine: Engine) -> None:
        if not (await engine.info()).loads:
            pytest.skip("this engine takes no weights")
        task = asyncio.create_task(engine.generate(request("a", [1, 2, 3], 240)))
        await until_decoding(engine)
        receipt = await engine.load(rig.good[1])
        said = await task
        old, new = said.spans
        assert (old.start, old.version, old.kv) == (0, 1, KVState.FRESH)
        assert (new.stop, new.version, new.kv) == (240, 2, KVState.RECOMPUTED)
        assert 0 < old.stop == new.start < 240
        # The prefix that is computed again: prompt and all samples but the last.
        assert receipt.tokens_recomputed == said.tokens_recomputed == 3 + old.stop - 1
        assert (receipt.version, receipt.digest) == (2, rig.good[1].digest)

    play(rig, script)


def test_an_idle_session_is_recomputed_at_its_next_turn(rig: Rig) -> None:
    async def script(engine: Engine) -> None:
        if not (await engine.info()).loads:
            pytest.skip("this engine takes no weights")
        first = await engine.generate(request("a", [1, 2, 3], 2))
        receipt = await engine.load(rig.good[1])
        assert receipt.tokens_recomputed == 0
        second = await engine.generate(request("a", [1, 2, 3, *first.token_ids, 4], 2))
        found = await found_again(engine, 4)
        kv = KVState.RECOMPUTED if found else KVState.FRESH
        assert [(s.version, s.kv) for s in second.spans] == [(2, kv)]
        computed = (second.tokens_recomputed, second.tokens_prefilled, second.tokens_cached)
        assert computed == (found, 6 - found, 0)

    play(rig, script)


def test_a_refused_load_keeps_the_old_version_as_the_old_version(rig: Rig) -> None:
    async def script(engine: Engine) -> None:
        if not (await engine.info()).loads:
            pytest.skip("this engine takes no weights")
        before = await engine.generate(request("a", [1, 2, 3]))
        with pytest.raises(TransportFault):
            await engine.load(rig.broken)
        assert (await engine.info()).version == 1
        after = await engine.generate(request("b", [1, 2, 3]))
        assert after.spans[0].version == 1
        assert (after.token_ids, after.logps) == (before.token_ids, before.logps)

    play(rig, script)


def test_release_aborts_a_running_turn_and_forgets_the_session(rig: Rig) -> None:
    async def script(engine: Engine) -> None:
        task = asyncio.create_task(engine.generate(request("a", [1, 2, 3], 240)))
        await until_decoding(engine)
        await engine.release("a")
        said: Completion = await task
        assert said.finish is FinishReason.ABORT
        assert (0 < len(said.token_ids) < 240) if rig.partial else not said.token_ids
        assert sum(s.stop - s.start for s in said.spans) == len(said.token_ids) == len(said.logps)
        again = await engine.generate(request("a", [1, 2, 3], 2))
        assert again.tokens_cached == 0
        await engine.release("unknown")

    play(rig, script)


def test_close_aborts_what_runs_and_refuses_what_comes(rig: Rig) -> None:
    async def script(engine: Engine) -> None:
        task = asyncio.create_task(engine.generate(request("a", [1, 2, 3], 240)))
        await until_decoding(engine)
        await engine.close()
        assert (await task).finish is FinishReason.ABORT
        with pytest.raises(EngineFault, match="closed"):
            await engine.generate(request("b", [1]))
        with pytest.raises(EngineFault, match="closed"):
            await engine.load(rig.good[1])

    play(rig, script)


def test_a_session_has_one_turn_at_a_time(rig: Rig) -> None:
    async def script(engine: Engine) -> None:
        task = asyncio.create_task(engine.generate(request("a", [1, 2, 3], 50)))
        await until_decoding(engine)
        with pytest.raises(EngineFault, match="session a"):
            await engine.generate(request("a", [1, 2, 3]))
        assert len((await task).token_ids) == 50

    play(rig, script)


def test_activity_adds_up_to_the_tokens_and_is_reported_once(rig: Rig) -> None:
    async def script(engine: Engine) -> None:
        await asyncio.gather(*(engine.generate(request(f"a{i}", [1, 2, 3], 9)) for i in range(3)))
        stretches = await engine.activity()
        assert sum(a.tokens_decoded for a in stretches) == 27
        assert sum(a.tokens_prefilled for a in stretches) == 9
        assert all(a.t0 <= a.t1 for a in stretches)
        assert await engine.activity() == []

    play(rig, script)
