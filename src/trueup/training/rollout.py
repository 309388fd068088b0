"""One episode: the dialogue between an engine and an environment, recorded token by token.

Token in, token out: what the engine sampled is appended as sampled and never tokenised again, so
ids, log-probs and spans are of one length by construction. Whatever fails on the way becomes data
at this boundary; an episode that failed keeps what it has and carries no reward.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from trueup.engines.base import Engine
from trueup.environments.base import Step
from trueup.errors import DataError, EngineFault, EnvironmentFault, GraderFault, TrueupError
from trueup.training.messages import EpisodeSpec
from trueup.training.payload import PayloadStore, ref_of
from trueup.training.probe import ProbeSet, decode
from trueup.types import (
    Completion,
    Episode,
    EpisodeRef,
    EpisodeStatus,
    Failure,
    FailureKind,
    FinishReason,
    GenerateRequest,
    Rescored,
    SamplingParams,
    Segment,
    Span,
    Turn,
)

_FAILURES: dict[type[TrueupError], FailureKind] = {
    DataError: FailureKind.DATA,
    EngineFault: FailureKind.ENGINE,
    EnvironmentFault: FailureKind.ENVIRONMENT,
    GraderFault: FailureKind.GRADER,
}


class World(Protocol):
    """An environment's attempt, driven asynchronously with deadlines."""

    @property
    def sandbox(self) -> str:
        """Backend that isolates the code it runs."""
        ...

    async def start(self) -> str:
        """Text of the task."""
        ...

    async def step(self, action: str) -> Step:
        """Act."""
        ...

    async def finish(self) -> float:
        """Grade what is there."""
        ...

    async def close(self) -> None:
        """Free it."""
        ...


class Dialogue(Protocol):
    """Text to token ids and back."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an action."""
        ...

    def start(self, text: str) -> array[int]:
        """Ids of the task, up to where the agent speaks."""
        ...

    def observe(self, text: str) -> array[int]:
        """Ids of an observation, up to where the agent speaks."""
        ...

    def action_text(self, ids: array[int]) -> str:
        """Text of a sampled action."""
        ...


class Rollout:
    """Runs episodes.

    Args:
        engines: By the index that the schedule uses.
        make_world: A fresh attempt at the task of an episode.
        dialogue: Renders text.
        store: Keeps the tokens of finished episodes.
        max_turns: Turns after which an episode is graded as it stands.
        max_tokens: Most tokens of one turn.
        probes: What `probe` has engines decode.
        now: Monotonic seconds.
    """

    exposed = ("run", "abort", "probe")

    def __init__(
        self,
        engines: list[Engine],
        make_world: Callable[[EpisodeSpec], World],
        dialogue: Dialogue,
        store: PayloadStore,
        *,
        max_turns: int,
        max_tokens: int,
        probes: ProbeSet | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing runs."""
        self._engines = engines
        self._make_world = make_world
        self._dialogue = dialogue
        self._store = store
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._probes = probes
        self._now = now
        self._running: dict[str, int] = {}
        self._withdrawn: set[str] = set()

    async def run(self, spec: EpisodeSpec) -> EpisodeRef:
        """Run an attempt to its end; it never raises for a failure of engine or environment."""
        self._running[spec.id] = spec.engine
        world = self._make_world(spec)
        record = _Record(spec, self._dialogue, self._now)
        try:
            status, reward, failure = await self._play(spec, world, record)
        finally:
            del self._running[spec.id]
            self._withdrawn.discard(spec.id)
            await world.close()
            with suppress(EngineFault):  # an engine that is gone has forgotten the session
                await self._engines[spec.engine].release(spec.id)
        episode = record.episode(world.sandbox, status, reward, failure)
        return self._store.put(episode) if spec.store else ref_of(episode)

    async def abort(self, episode: str) -> None:
        """Withdraw an attempt: it ends as ABORTED at its next token; unknown ones are ignored."""
        if episode in self._running:
            self._withdrawn.add(episode)
            with suppress(EngineFault):
                await self._engines[self._running[episode]].release(episode)

    async def probe(self, engine: int, name: str) -> tuple[str, ...]:
        """Have an engine decode the probe set: ids of what is stored, none if there is no set.

        Raises:
            EngineFault: It could not.
        """
        if self._probes is None:
            return ()
        episodes = await decode(self._engines[engine], self._probes, name=name)
        return tuple(self._store.put(episode).id for episode in episodes)

    async def _play(
        self, spec: EpisodeSpec, world: World, record: _Record
    ) -> tuple[EpisodeStatus, float | None, Failure | None]:
        try:
            record.prompt(await world.start())
            for turn in range(self._max_turns):
                if spec.id in self._withdrawn:
                    return EpisodeStatus.ABORTED, None, None
                completion = await self._engines[spec.engine].generate(self._request(record, turn))
                record.action(completion)
                if completion.finish is FinishReason.ABORT:
                    return EpisodeStatus.ABORTED, None, None
                if completion.finish is FinishReason.LENGTH:
                    return EpisodeStatus.TRUNCATED, await world.finish(), None
                step = await world.step(self._dialogue.action_text(completion.token_ids))
                record.turn(step)
                if step.done:
                    return EpisodeStatus.DONE, step.reward, None
                record.observation(step.observation, last=turn + 1 == self._max_turns)
            return EpisodeStatus.TURN_LIMIT, await world.finish(), None
        except (DataError, EngineFault, EnvironmentFault, GraderFault) as error:
            failure = Failure(
                kind=_FAILURES[type(error)], reason=error.field or error.kind, message=error.message
            )
            return EpisodeStatus.FAILED, None, failure

    def _request(self, record: _Record, turn: int) -> GenerateRequest:
        spec = record.spec
        return GenerateRequest(
            session=spec.id,
            prompt_ids=record.token_ids,
            sampling=SamplingParams(
                max_tokens=self._max_tokens,
                stop_ids=self._dialogue.stop_ids,
                temperature=spec.temperature,
                key=(*spec.key, turn),
            ),
        )


class _Record:
    """An episode while it is being written."""

    def __init__(self, spec: EpisodeSpec, dialogue: Dialogue, now: Callable[[], float]) -> None:
        self.spec = spec
        self.token_ids = array("i")
        self._dialogue = dialogue
        self._now = now
        self._action, self._turn = array("b"), array("i")
        self._logps = array("f")
        self._spans: list[Span] = []
        self._rescored: list[Rescored] = []
        self._turns: list[Turn] = []
        self._counters: Counter[str] = Counter()
        self._t_submit = self._t_turn = now()
        self._t_start = 0.0
        self._tokens_in = 0

    def prompt(self, text: str) -> None:
        """The task."""
        self._append(self._dialogue.start(text), action=False)

    def observation(self, text: str, *, last: bool) -> None:
        """What the environment answered; after the last turn nobody reads it."""
        if not last:
            self._append(self._dialogue.observe(text), action=False)

    def action(self, completion: Completion) -> None:
        """What the engine sampled."""
        start = len(self._logps)
        if not self._turns:
            self._t_start = completion.t_start
        self._append(completion.token_ids, action=True)
        self._logps.extend(completion.logps)
        self._rescored.extend(
            replace(again, start=again.start + start) for again in completion.rescored
        )
        self._spans.extend(
            replace(span, start=span.start + start, stop=span.stop + start)
            for span in completion.spans
        )
        self._turns.append(
            Turn(
                t_start=self._t_turn,
                t_end=self._now(),
                tokens_in=self._tokens_in,
                tokens_out=len(completion.token_ids),
            )
        )
        self._tokens_in = 0
        self._t_turn = self._now()

    def turn(self, step: Step) -> None:
        """What the environment did with the action."""
        self._counters.update(step.counters)
        self._turns[-1] = replace(
            self._turns[-1],
            t_end=self._now(),
            tool=step.tool,
            tool_s=step.tool_s,
            tool_status=step.tool_status,
        )
        self._t_turn = self._now()

    def episode(
        self,
        sandbox: str,
        status: EpisodeStatus,
        reward: float | None,
        failure: Failure | None,
    ) -> Episode:
        """The finished record; adjacent spans of one provenance are joined."""
        spec = self.spec
        segment = Segment(
            token_ids=self.token_ids,
            action=self._action,
            turn=self._turn,
            logp_behaviour=self._logps,
            spans=_joined(self._spans),
            rescored=tuple(self._rescored),
        )
        return Episode(
            id=spec.id,
            task=spec.task.id,
            group=spec.group,
            member=spec.member,
            attempt=spec.attempt,
            segments=(segment,) if len(self.token_ids) else (),
            turns=tuple(self._turns),
            status=status,
            reward=reward,
            failure=failure,
            sandbox=sandbox,
            counters=dict(self._counters),
            t_submit=self._t_submit,
            t_start=self._t_start,
            t_end=self._now(),
        )

    def _append(self, ids: array[int], *, action: bool) -> None:
        self.token_ids = self.token_ids + ids
        self._action.extend([int(action)] * len(ids))
        self._turn.extend([len(self._turns)] * len(ids))
        self._tokens_in += 0 if action else len(ids)


def _joined(spans: list[Span]) -> tuple[Span, ...]:
    joined: list[Span] = []
    for span in spans:
        if joined and replace(joined[-1], start=span.start, stop=span.stop) == span:
            joined[-1] = replace(joined[-1], stop=span.stop)
        else:
            joined.append(span)
    return tuple(joined)
