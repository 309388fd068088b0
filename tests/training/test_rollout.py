import asyncio
import itertools
import random
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.dialogues import STOP, FakeWorld, NumberDialogue, spec
from support.episodes import span
from trueup.engines.scripted import Reply, ScriptedEngine
from trueup.environments.base import Step
from trueup.errors import EngineFault, EnvironmentFault, GraderFault, TransportFault
from trueup.training.messages import EpisodeSpec
from trueup.training.payload import PayloadStore, ref_of
from trueup.training.rollout import Rollout
from trueup.training.step_batch import StepBatch
from trueup.types import (
    Episode,
    EpisodeRef,
    EpisodeStatus,
    FailureKind,
    GenerateRequest,
    Span,
    WeightManifest,
)

MORE = Step(observation="21", done=False, tool="read", tool_s=0.5, counters={"reads": 1})
DONE = Step(observation="", done=True, reward=1.0, tool="patch", counters={"reads": 1})


def manifest(version: int) -> WeightManifest:
    return WeightManifest(
        version=version,
        transport="none",
        location="",
        digest=f"d{version}",
        tensors=(),
        nbytes=0,
        n_changed=0,
    )


def says(*turns: Reply) -> Callable[[GenerateRequest], Reply]:
    """Turn i of any session gets reply i: the turn is the last part of its noise key."""
    return lambda request: turns[request.sampling.key[-1]]


def reply(*ids: int, **options: object) -> Reply:
    """Ids with the log-probs -1/4, -2/4, -3/4, ..."""
    return Reply(token_ids=ids, logps=[-(i + 1) / 4 for i in range(len(ids))], **options)


@dataclass
class Rig:
    """A rollout on one scripted engine at version 5 and one world."""

    store: PayloadStore
    world: FakeWorld = field(default_factory=FakeWorld)
    engine: ScriptedEngine = field(default_factory=lambda: ScriptedEngine({}))
    max_turns: int = 3
    max_tokens: int = 4
    rollout: Rollout = field(init=False)

    def __post_init__(self) -> None:
        ticks = itertools.count(100)
        self.rollout = Rollout(
            [self.engine],
            lambda spec: self.world,
            NumberDialogue(),
            self.store,
            max_turns=self.max_turns,
            max_tokens=self.max_tokens,
            now=lambda: float(next(ticks)),
        )

    async def play(self, attempt: EpisodeSpec | None = None) -> EpisodeRef:
        await self.engine.load(manifest(5))
        return await self.rollout.run(attempt or spec())

    def run(self) -> Episode:
        """The stored episode; whatever happened, nothing is left open."""
        ref = asyncio.run(self.play())
        self.assert_nothing_is_left_open()
        episode = self.store.get(ref.id)
        assert ref == ref_of(episode)
        return episode

    def assert_nothing_is_left_open(self) -> None:
        assert [name for name, _ in self.world.calls].count("close") == 1
        assert self.world.calls[-1] == ("close", "")
        assert self.engine.calls[-1] == ("release", "e")


@pytest.fixture
def rig(tmp_path: Path) -> Callable[..., Rig]:
    def build(world: FakeWorld, *turns: Reply, **options: int) -> Rig:
        return Rig(PayloadStore(tmp_path), world, ScriptedEngine(says(*turns)), **options)

    return build


def versions(episode: Episode) -> list[tuple[int, int, int]]:
    return [(s.start, s.stop, s.version) for s in episode.segments[0].spans]


def test_an_episode_of_two_turns_by_hand(rig):
    episode = rig(FakeWorld([MORE, DONE]), reply(31, 32, STOP), reply(41, STOP)).run()
    (segment,) = episode.segments
    assert segment.token_ids == array("i", [11, 12, 31, 32, STOP, 21, 41, STOP])
    assert segment.action == array("b", [0, 0, 1, 1, 1, 0, 1, 1])
    assert segment.turn == array("i", [0, 0, 0, 0, 0, 1, 1, 1])
    assert segment.logp_behaviour == array("f", [-0.25, -0.5, -0.75, -0.25, -0.5])
    assert versions(episode) == [(0, 5, 5)]
    assert (episode.status, episode.reward, episode.failure) == (EpisodeStatus.DONE, 1.0, None)
    assert (episode.counters, episode.sandbox) == ({"reads": 2}, "fake")
    assert [(t.tokens_in, t.tokens_out, t.tool, t.tool_s) for t in episode.turns] == [
        (2, 3, "read", 0.5),
        (1, 2, "patch", 0.0),
    ]
    assert (episode.id, episode.task, episode.group, episode.member) == ("e", "t", 3, 1)


def test_times_go_up_from_submission_to_end(rig):
    episode = rig(FakeWorld([MORE, DONE]), reply(31, STOP), reply(41, STOP)).run()
    times = [episode.t_submit]
    for turn in episode.turns:
        times += [turn.t_start, turn.t_end]
    times.append(episode.t_end)
    assert times == sorted(times)
    assert episode.t_submit == 100.0


def test_an_episode_starts_when_its_first_turn_does(rig):
    acted: list[float] = []
    world = FakeWorld([MORE, DONE], before_step=lambda: acted.append(time.monotonic()))
    episode = rig(world, reply(31, STOP, delay_s=0.01), reply(41, STOP)).run()
    assert 0 < episode.t_start <= acted[0] - 0.01


def test_the_world_is_told_what_was_sampled_and_the_engine_all_that_was_said(rig):
    played = rig(FakeWorld([MORE, DONE]), reply(31, 32, STOP), reply(41, STOP))
    played.run()
    assert [text for name, text in played.world.calls if name == "step"] == ["31 32 0", "41 0"]
    asked = [call for name, call in played.engine.calls if name == "generate"]
    assert [list(request.prompt_ids) for request in asked] == [
        [11, 12],
        [11, 12, 31, 32, STOP, 21],
    ]
    assert {request.session for request in asked} == {"e"}
    assert [request.sampling.key for request in asked] == [(7, 3, 0, 1, 0, 0), (7, 3, 0, 1, 0, 1)]
    assert {request.sampling.stop_ids for request in asked} == {(STOP,)}


def test_the_temperature_and_the_length_of_a_turn_are_those_asked_for(rig):
    played = rig(FakeWorld([DONE]), reply(31, STOP), max_tokens=9)
    asyncio.run(played.play(spec(temperature=0.5)))
    (request,) = (call for name, call in played.engine.calls if name == "generate")
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.5, 9)


def test_a_version_that_arrives_before_the_first_token_is_the_only_one(rig):
    """V1"""
    episode = rig(FakeWorld([DONE]), reply(31, 32, STOP, versions={0: 6})).run()
    assert versions(episode) == [(0, 3, 6)]
    assert (ref_of(episode).version_min, ref_of(episode).version_max) == (6, 6)


def test_an_update_at_token_37_of_100_splits_the_span_there(rig):
    """V2"""
    said = reply(*range(1, 100), STOP, versions={37: 6})
    episode = rig(FakeWorld([DONE]), said, max_tokens=100).run()
    assert versions(episode) == [(0, 37, 5), (37, 100, 6)]


def test_spans_count_the_action_tokens_of_the_whole_episode(rig):
    """V2, in the second turn: its spans are moved behind those of the first."""
    episode = rig(
        FakeWorld([MORE, DONE]),
        reply(31, 32, STOP, versions={2: 6}),
        reply(41, 42, STOP, versions={1: 7}),
    ).run()
    # the second turn reads a cache that version 6 computed again: other provenance, own span
    assert versions(episode) == [(0, 2, 5), (2, 4, 6), (4, 6, 7)]


def test_adjacent_spans_of_one_provenance_are_joined_and_others_are_not(tmp_path: Path):
    class Relabels(ScriptedEngine):
        async def generate(self, request):
            said = await super().generate(request)
            spans: tuple[Span, ...] = (span(0, 1, 5), span(1, 2, 5), span(2, 3, 5, epoch=1))
            return replace(said, spans=spans)

    turns = says(reply(31, 32, STOP), reply(41, 42, STOP))
    played = Rig(PayloadStore(tmp_path), FakeWorld([MORE, DONE]), Relabels(turns))
    (segment,) = played.run().segments
    assert segment.spans == (
        span(0, 2, 5),
        span(2, 3, 5, epoch=1),
        span(3, 5, 5),
        span(5, 6, 5, epoch=1),
    )


def test_a_turn_cut_by_its_length_is_graded_as_it_stands_without_an_invented_end(rig):
    """L12"""
    played = rig(FakeWorld([MORE], verdict=0.5), reply(31, STOP), reply(41, 42, 43, 44, 45))
    episode = played.run()
    assert (episode.status, episode.reward) == (EpisodeStatus.TRUNCATED, 0.5)
    assert episode.segments[0].token_ids[-4:] == array("i", [41, 42, 43, 44])
    assert len(episode.segments[0].logp_behaviour) == 6
    assert [name for name, _ in played.world.calls] == ["start", "step", "finish", "close"]


def test_an_episode_that_used_all_its_turns_is_graded_as_it_stands(rig):
    played = rig(FakeWorld([MORE, MORE]), reply(31, STOP), reply(41, STOP), max_turns=2)
    episode = played.run()
    assert (episode.status, episode.reward) == (EpisodeStatus.TURN_LIMIT, 0.25)
    # the observation after the last turn is read by nobody
    assert list(episode.segments[0].token_ids) == [11, 12, 31, STOP, 21, 41, STOP]
    assert [turn.tool for turn in episode.turns] == ["read", "read"]


LOST = EnvironmentFault("the worker died", field="worker_lost")
NO_VERDICT = GraderFault(field="reward", rule="finite", value="1e30")
SICK = EngineFault("not finite", field="logits")


@pytest.mark.parametrize(
    ("world", "turns", "kind", "reason", "tokens"),
    [
        (FakeWorld(text=LOST), [], FailureKind.ENVIRONMENT, "worker_lost", 0),
        (FakeWorld([LOST]), [reply(31, STOP)], FailureKind.ENVIRONMENT, "worker_lost", 2),
        (
            FakeWorld([MORE, EnvironmentFault("?")]),
            [reply(31, STOP), reply(41, STOP)],
            FailureKind.ENVIRONMENT,
            "environment",
            4,
        ),
        (FakeWorld([NO_VERDICT]), [reply(31, STOP)], FailureKind.GRADER, "reward", 2),
        (FakeWorld(verdict=NO_VERDICT), [reply(31, 32, 33, 34)], FailureKind.GRADER, "reward", 4),
        (FakeWorld(), [reply(fault=SICK)], FailureKind.ENGINE, "logits", 0),
        (FakeWorld([MORE]), [reply(31, STOP), reply(fault=SICK)], FailureKind.ENGINE, "logits", 2),
    ],
    ids=["start", "step", "second step", "verdict", "last verdict", "engine", "engine later"],
)
def test_a_fault_is_a_failed_episode_with_its_cause_and_no_reward(
    rig, world, turns, kind, reason, tokens
):
    """L4, L6"""
    world = FakeWorld(world.steps, world.verdict, world.text)
    episode = rig(world, *turns).run()
    assert (episode.status, episode.reward) == (EpisodeStatus.FAILED, None)
    assert episode.failure is not None
    assert (episode.failure.kind, episode.failure.reason) == (kind, reason)
    assert episode.failure.message
    assert ref_of(episode).action_tokens == tokens


def test_an_engine_that_is_gone_fails_the_episode_and_not_the_rollout(tmp_path: Path):
    class Gone(ScriptedEngine):
        async def generate(self, request):
            raise EngineFault("engine-0 is gone", field="engine-0")

        async def release(self, session):
            self.calls.append(("release", session))
            raise EngineFault("engine-0 is gone", field="engine-0")

    episode = Rig(PayloadStore(tmp_path), FakeWorld(), Gone({})).run()
    assert episode.failure is not None
    assert episode.failure.kind is FailureKind.ENGINE


def test_data_that_breaks_its_schema_fails_the_attempt(rig):
    episode = rig(FakeWorld(), Reply(token_ids=(31,), logps=(-1.0,))).run()
    assert (episode.status, episode.reward) == (EpisodeStatus.FAILED, None)
    assert episode.failure is not None
    assert episode.failure.kind is FailureKind.DATA


def test_what_is_no_failure_of_an_attempt_is_raised_after_cleaning_up(rig):
    played = rig(FakeWorld(text=TransportFault("weights are gone", field="weights")))
    with pytest.raises(TransportFault, match="weights"):
        asyncio.run(played.play())
    played.assert_nothing_is_left_open()


def aborted(played: Rig, when: Callable[[], bool]) -> Episode:
    async def main() -> EpisodeRef:
        running = asyncio.create_task(played.play())
        while not when():
            await asyncio.sleep(0)
        await played.rollout.abort("e")
        return await asyncio.wait_for(running, 10)

    ref = asyncio.run(main())
    played.assert_nothing_is_left_open()
    return played.store.get(ref.id)


def test_an_attempt_withdrawn_while_it_samples_keeps_what_it_has(rig):
    slow = reply(*range(41, 99), token_s=0.001)
    played = rig(FakeWorld([MORE]), reply(31, STOP), slow, max_tokens=50)

    def samples() -> bool:
        return [name for name, _ in played.engine.calls].count("generate") == 2

    episode = aborted(played, samples)
    assert (episode.status, episode.reward) == (EpisodeStatus.ABORTED, None)
    (segment,) = episode.segments
    assert len(segment.logp_behaviour) == sum(segment.action) < 52
    assert segment.logp_behaviour[:2] == array("f", [-0.25, -0.5])


def test_an_attempt_withdrawn_while_its_world_acts_samples_no_more(rig):
    gate = asyncio.Event()
    world = FakeWorld([MORE, DONE], before_step=lambda: waiting())
    acting = []

    async def waiting() -> None:
        acting.append(True)
        await asyncio.sleep(0.01)
        gate.set()

    played = rig(world, reply(31, STOP), reply(41, STOP))
    episode = aborted(played, lambda: bool(acting))
    assert episode.status is EpisodeStatus.ABORTED
    assert [name for name, _ in played.engine.calls].count("generate") == 1
    assert gate.is_set(), "the world's step was not cut off"


def test_an_id_that_was_withdrawn_can_run_again(rig):
    played = rig(FakeWorld([DONE]), reply(31, STOP, delay_s=0.02))
    first = aborted(played, lambda: ("start", "") in played.world.calls)
    assert first.status is EpisodeStatus.ABORTED
    played.world.calls.clear()
    assert played.run().status is EpisodeStatus.DONE


def test_withdrawing_what_does_not_run_does_nothing(rig):
    played = rig(FakeWorld([DONE]), reply(31, STOP))
    asyncio.run(played.rollout.abort("e"))
    assert played.run().status is EpisodeStatus.DONE


def test_an_episode_for_evaluation_is_not_stored(rig, tmp_path: Path):
    played = rig(FakeWorld([DONE]), reply(31, STOP))
    ref = asyncio.run(played.play(spec(store=False)))
    assert (ref.reward, ref.action_tokens) == (1.0, 2)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_ids_log_probs_and_spans_are_of_one_length_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, seed: int
):
    """L11: random turns, updates and faults; what ended well packs into a step batch."""
    chance = random.Random(seed)
    turns, version = [], 5
    for _ in range(3):
        length = chance.randint(1, 6)
        marks = {}
        for at in sorted(chance.sample(range(length), chance.randint(0, min(2, length)))):
            version += 1
            marks[at] = version
        ids = [*range(31, 31 + length - 1), STOP, 1, 1, 1, 1]
        fault = SICK if chance.random() < 0.1 else None
        turns.append(reply(*ids, versions=marks, fault=fault))
    steps = [chance.choice([MORE, MORE, DONE, LOST]) for _ in turns]
    store = PayloadStore(tmp_path_factory.mktemp("run"))
    episode = Rig(store, FakeWorld(steps), ScriptedEngine(says(*turns))).run()
    for segment in episode.segments:
        n = sum(segment.action)
        assert len(segment.token_ids) == len(segment.action) == len(segment.turn)
        assert len(segment.logp_behaviour) == n
        edges = [0, *(edge for s in segment.spans for edge in (s.start, s.stop)), n]
        assert edges[::2] == edges[1::2]
        assert sum(turn.tokens_out for turn in episode.turns) == n
    assert (episode.reward is None) == (episode.status is EpisodeStatus.FAILED)
    if episode.reward is not None:
        StepBatch.collect([episode], [version])
