"""The fixed sequences, decoded by a real engine."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from support.embedded import POSITIONS, VOCABULARY, Publisher, reference_logps, tiny
from trueup import config
from trueup.engines.base import Engine
from trueup.engines.embedded.engine import EmbeddedEngine
from trueup.engines.scripted import Reply, ScriptedEngine
from trueup.errors import ConfigError, EngineFault
from trueup.training.probe import ProbeSet, decode
from trueup.types import Completion, Episode, GenerateRequest, LoadReceipt

SETTINGS = ("probe.sequences=3", "probe.tokens=5", "seed=4")


def probes(*overrides: str) -> ProbeSet:
    settings = config.load("", (*SETTINGS, *overrides))
    return ProbeSet.of(settings, vocabulary=VOCABULARY, positions=POSITIONS)


def decoded(engine: Engine, *sets: ProbeSet) -> list[tuple[Episode, ...]]:
    async def main() -> list[tuple[Episode, ...]]:
        found = [await decode(engine, each, name=f"p{i}") for i, each in enumerate(sets)]
        await engine.close()
        return found

    return asyncio.run(main())


def serving(*, slots: int = 2) -> EmbeddedEngine:
    return EmbeddedEngine(Publisher().serving(tiny(), slots=slots))


def test_a_sequence_is_two_turns_of_which_the_second_is_behind_a_cache():
    (episodes,) = decoded(serving(), probes())
    assert [episode.id for episode in episodes] == ["p0-0", "p0-1", "p0-2"]
    for episode in episodes:
        (segment,) = episode.segments
        assert list(segment.action) == [0] * 32 + [1] * 5 + [0] * 4 + [1] * 5
        assert len(segment.token_ids) == len(segment.turn) == 46
        assert sum(segment.turn) == 9
        assert len(segment.logp_behaviour) == 10
        assert [(s.start, s.stop) for s in segment.spans] == [(0, 5), (5, 10)]
        # All that was there before but the last sample, which has no keys and values yet.
        assert episode.counters == {"prompt": 41, "cached": 36}


def test_log_probs_are_those_of_one_forward_over_both_turns():
    model = tiny()
    (episodes,) = decoded(EmbeddedEngine(Publisher().serving(model)), probes())
    for episode in episodes:
        (segment,) = episode.segments
        ids = list(segment.token_ids)
        expected = [
            *reference_logps(model, ids[:32], ids[32:37]).tolist(),
            *reference_logps(model, ids[:41], ids[41:]).tolist(),
        ]
        assert list(segment.logp_behaviour) == pytest.approx(expected, abs=1e-4)


def test_the_same_weights_decode_the_same_tokens_whenever_they_are_asked():
    first, again, other = decoded(serving(slots=8), probes(), probes(), probes("seed=5"))
    assert [e.segments[0].token_ids for e in first] == [e.segments[0].token_ids for e in again]
    assert [e.segments[0].token_ids for e in first] != [e.segments[0].token_ids for e in other]


def test_prompts_fill_a_cache_block_where_the_model_has_room_for_it():
    settings = config.load("", SETTINGS)
    large = ProbeSet.of(settings, vocabulary=50_000, positions=2048)
    assert {len(prompt) for prompt in large.prompts} == {160}
    assert len({tuple(prompt) for prompt in large.prompts}) == 3
    assert large == ProbeSet.of(settings, vocabulary=50_000, positions=2048)
    assert max(max(prompt) for prompt in probes().prompts) < VOCABULARY


def test_turns_that_do_not_fit_the_model_are_refused():
    with pytest.raises(ConfigError, match="at most 110, for a model of 256"):
        probes("probe.tokens=111")
    assert probes("probe.tokens=110").tokens == 110


def test_a_run_that_probes_nothing_has_no_set(tmp_path: Path):
    shape = {"vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert ProbeSet.load(config.load("", ["probe.every=0"]), tmp_path) is None
    assert ProbeSet.load(config.load("", SETTINGS), tmp_path) == probes()


def test_an_engine_that_fails_in_one_sequence_fails_the_probe_and_keeps_none_of_them():
    def reply(request: GenerateRequest) -> Reply:
        said = Reply(token_ids=[1] * 5, logps=[-1.0] * 5)
        broken = EngineFault(field="logits", rule="finite", value="non-finite")
        return replace(said, fault=broken) if request.session == "p0-1" else said

    engine = ScriptedEngine(reply)

    async def main() -> LoadReceipt:
        receipt = await engine.load(Publisher().publish(tiny()))
        with pytest.raises(EngineFault, match="finite"):
            await decode(engine, probes(), name="p0")
        return receipt

    asyncio.run(main())
    released = [session for call, session in engine.calls if call == "release"]
    assert sorted(map(str, released)) == ["p0-0", "p0-1", "p0-2"]


def test_ids_without_a_log_prob_are_a_fault_of_the_engine():
    class Dropping(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Completion:
            said = await super().generate(request)
            return replace(said, logps=said.logps[1:])

    async def main() -> None:
        engine = Dropping(lambda request: Reply(token_ids=[1] * 5, logps=[-1.0] * 5))
        await engine.load(Publisher().publish(tiny()))
        with pytest.raises(EngineFault, match="a log-prob and a span position per token"):
            await decode(engine, probes(), name="p")

    asyncio.run(main())
