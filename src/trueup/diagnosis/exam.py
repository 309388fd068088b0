"""Questions to an engine whose answers tell causes apart, asked through its port alone.

Four waves around one update, from version u to version v:

    before   fresh sessions under u, some of them at another temperature; some sessions stay
    across   long turns without a stop, in flight while v is loaded
    after    the prompts of `before` again, in fresh sessions under v
    again    the sessions that stayed, a second turn under v

Before alone tells what is wrong at any time (a layer, a temperature, a truncated support). After
tells what is left of u (a tensor, the head, the label). Across tells where labels change and whose
keys and values are read. After and again tell whether a cached prefix outlives the update.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from trueup.diagnosis.rollouts import Rollouts, sample
from trueup.diagnosis.scorer import Weights
from trueup.engines.base import Engine
from trueup.errors import DataError
from trueup.types import GenerateRequest, SamplingParams, WeightManifest

OTHER_TEMPERATURE = 0.7
"""Of every fourth request: what is reported at one temperature may be that of another."""
_POLL_S = 0.002


class Wave(StrEnum):
    """When a completion was asked for."""

    BEFORE = "before"
    ACROSS = "across"
    AFTER = "after"
    AGAIN = "again"


@dataclass(frozen=True, kw_only=True)
class Version:
    """A version's tensors, as the trainer holds them."""

    version: int
    """Its number."""
    weights: Weights


@dataclass(frozen=True, kw_only=True)
class Release(Version):
    """A version that engines can load."""

    manifest: WeightManifest

    @classmethod
    def of(cls, manifest: WeightManifest, weights: Weights) -> Self:
        """What a transport has published."""
        return cls(version=manifest.version, weights=weights, manifest=manifest)


@dataclass(frozen=True, kw_only=True)
class Questions:
    """How much to ask."""

    prompts: Sequence[array[int]]
    """Token ids; used in turn."""
    stop_ids: tuple[int, ...] = ()
    max_tokens: int = 24
    rows: int = 48
    """Completions of `before` and of each round of `after`."""
    across_rows: int = 32
    across_tokens: int = 72
    rounds: int = 4
    """Most rounds of `after`."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What came back, and what had been acknowledged when it was asked for."""

    rollouts: Rollouts
    waves: tuple[Wave, ...]
    """[S] when each was asked for."""
    acknowledged: tuple[int, ...]
    """[S] version that the engine had acknowledged before."""
    cached: tuple[int, ...]
    """[S] positions that a cache may hold since the version before: of an earlier turn or of the
    same prompt."""
    precision: str
    """What the engine claims to compute in."""

    @cached_property
    def wave(self) -> dict[Wave, Tensor]:
        """[S] bool for each wave."""
        return {w: torch.tensor([x is w for x in self.waves]) for w in Wave}

    def joined(self, other: Answers) -> Answers:
        """These and further ones."""
        return Answers(
            rollouts=self.rollouts.joined(other.rollouts),
            waves=self.waves + other.waves,
            acknowledged=self.acknowledged + other.acknowledged,
            cached=self.cached + other.cached,
            precision=self.precision,
        )


class Examiner:
    """Asks an engine; the two versions are loaded on the way.

    Args:
        engine: Empty or serving.
        old: Version u.
        new: Version v.
        questions: How much to ask.
    """

    def __init__(self, engine: Engine, old: Release, new: Release, questions: Questions) -> None:
        """Ask nothing yet."""
        self._engine = engine
        self._old, self._new = old, new
        self._questions = questions
        self._round = 0

    async def first(self) -> Answers:
        """All four waves.

        Raises:
            DataError: There is no prompt.
            EngineFault: The engine failed.
        """
        questions, old = self._questions, self._old.version
        if not questions.prompts:
            raise DataError(field="prompts", rule="at least one", value="none")
        await self._engine.load(self._old.manifest)
        info = await self._engine.info()
        # A session that stays holds its slot; of a few slots none can be spared.
        staying = min(info.slots // 4, questions.rows // 4)
        asked = self._requests("before", questions.rows)
        stay = await sample(self._engine, asked[:staying], keep=True)
        before = stay.joined(await sample(self._engine, asked[staying:]))
        cold = [0] * len(before.completions)
        answers = self._answers(before, Wave.BEFORE, old, cold, info.precision)
        across = await self._across(min(questions.across_rows, max(1, info.slots - staying)))
        nothing = [0] * len(across.completions)
        answers = answers.joined(self._answers(across, Wave.ACROSS, old, nothing, info.precision))
        again, held = await self._again(stay)
        answers = answers.joined(
            self._answers(again, Wave.AGAIN, self._new.version, held, info.precision)
        )
        return answers.joined(await self.more())

    async def more(self) -> Answers:
        """One further round of `after`."""
        name = f"after-{self._round}"
        self._round += 1
        asked = self._requests(name, self._questions.rows, first=self._round == 1)
        rollouts = await sample(self._engine, asked)
        known = [len(r.prompt_ids) - 1 for r in rollouts.requests] if self._round == 1 else None
        cached = known or [0] * len(rollouts.completions)
        info = await self._engine.info()
        return self._answers(rollouts, Wave.AFTER, self._new.version, cached, info.precision)

    def _answers(
        self, rollouts: Rollouts, wave: Wave, acknowledged: int, cached: Sequence[int], claim: str
    ) -> Answers:
        count = len(rollouts.completions)
        return Answers(
            rollouts=rollouts,
            waves=(wave,) * count,
            acknowledged=(acknowledged,) * count,
            cached=tuple(cached),
            precision=claim,
        )

    async def _across(self, rows: int) -> Rollouts:
        """Turns that are in flight while the new version is loaded."""
        questions = self._questions
        length = questions.across_tokens
        asked = self._requests("across", rows, length=length, stop=False)
        await self._engine.activity()
        turns = asyncio.create_task(sample(self._engine, asked))
        await self._until(rows * length // 4, turns)
        try:
            await self._engine.load(self._new.manifest)
        finally:
            rollouts = await turns
        return rollouts

    async def _until(self, tokens: int, turns: asyncio.Task[Rollouts]) -> None:
        """Wait until so many tokens were decoded."""
        decoded = 0
        while decoded < tokens and not turns.done():
            await asyncio.sleep(_POLL_S)
            decoded += sum(a.tokens_decoded for a in await self._engine.activity())

    async def _again(self, stay: Rollouts) -> tuple[Rollouts, list[int]]:
        """A second turn of the sessions that stayed, and how much of each may be cached."""
        asked, held = [], []
        pairs = zip(stay.requests, stay.completions, strict=True)
        for index, (request, said) in enumerate(pairs):
            prompt = self._questions.prompts[(index + 1) % len(self._questions.prompts)]
            sampling = replace(request.sampling, key=(*request.sampling.key, 1))
            ids = request.prompt_ids + said.token_ids + prompt[:4]
            asked.append(replace(request, prompt_ids=ids, sampling=sampling))
            held.append(len(request.prompt_ids) + len(said.token_ids) - 1)
        return await sample(self._engine, asked), held

    def _requests(
        self,
        name: str,
        rows: int,
        *,
        length: int | None = None,
        stop: bool = True,
        first: bool = True,
    ) -> list[GenerateRequest]:
        """Requests of fresh sessions; a later round takes prompts from elsewhere in the list."""
        questions = self._questions
        shift = 0 if first else self._round * rows
        salt = [*name.encode()]
        return [
            GenerateRequest(
                session=f"exam-{questions.seed}-{name}-{i}",
                prompt_ids=questions.prompts[(i + shift) % len(questions.prompts)],
                sampling=SamplingParams(
                    max_tokens=length or questions.max_tokens,
                    stop_ids=questions.stop_ids if stop else (),
                    temperature=OTHER_TEMPERATURE if stop and i % 4 == 3 else 1.0,
                    key=(questions.seed, *salt, i),
                ),
            )
            for i in range(rows)
        ]
