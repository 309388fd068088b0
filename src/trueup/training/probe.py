"""The fixed sequences that every engine decodes after a load, for the trainer to score.

Two turns each: the first fills the engine's cache, the second is decoded behind it, as in an
episode. Prompts, observations and sampling noise are the same in every load of a run, so a cache
that outlived its weights is hit, and what differs between two loads is what the engine changed.
Ids are drawn at random from the whole vocabulary: they fit every model and need no text.

Loads no torch: it runs where the rollout does.
"""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from trueup.config import Config
from trueup.engines.base import Engine
from trueup.errors import ConfigError, EngineFault
from trueup.types import (
    Completion,
    Episode,
    EpisodeStatus,
    GenerateRequest,
    SamplingParams,
    Segment,
)

_PROMPT = 160
"""Tokens of a prompt: more than the 128 of the largest cache block met (vLLM on a CPU)."""
_SHARE = 8
"""A prompt takes at most 1 / _SHARE of a small model's positions."""
_OBSERVATION = 4
"""Tokens between the turns."""
_KEY = 1 << 41
"""Noise keys of probes lie beyond those of training and evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSet:
    """What is decoded."""

    prompts: tuple[array[int], ...]
    """Ids before the first turn of each sequence (`array('i')`)."""
    observations: tuple[array[int], ...]
    """Ids between its turns."""
    tokens: int
    """Sampled in each turn; nothing stops it earlier."""
    temperature: float
    seed: int
    """Of ids and noise."""

    @classmethod
    def of(cls, config: Config, *, vocabulary: int, positions: int) -> Self:
        """Draw the set of a run.

        Args:
            config: Its `probe` section, sampling temperature and seed.
            vocabulary: Ids are below it.
            positions: Tokens that the model can hold.

        Raises:
            ConfigError: Two turns of so many tokens do not fit the model.
        """
        settings = config.probe
        prompt = min(_PROMPT, positions // _SHARE)
        free = (positions - prompt - _OBSERVATION) // 2
        if settings.tokens > free or not prompt:
            raise ConfigError(
                field="probe.tokens",
                rule=f"at most {max(free, 0)}, for a model of {positions} positions",
                value=settings.tokens,
            )
        draw = random.Random(f"probe/{config.seed}")

        def ids(length: int) -> array[int]:
            return array("i", [draw.randrange(vocabulary) for _ in range(length)])

        return cls(
            prompts=tuple(ids(prompt) for _ in range(settings.sequences)),
            observations=tuple(ids(_OBSERVATION) for _ in range(settings.sequences)),
            tokens=settings.tokens,
            temperature=config.engine.temperature,
            seed=config.seed,
        )

    @classmethod
    def load(cls, config: Config, model: Path) -> Self | None:
        """The set of a run for a model directory; None where the run probes nothing.

        Raises:
            ConfigError: See `of`.
        """
        if not config.probe.every:
            return None
        shape = json.loads((model / "config.json").read_text())
        return cls.of(
            config, vocabulary=shape["vocab_size"], positions=shape["max_position_embeddings"]
        )


async def decode(engine: Engine, probes: ProbeSet, *, name: str) -> tuple[Episode, ...]:
    """Have an engine decode the set and forget it.

    Args:
        engine: Serves a version.
        probes: What to decode.
        name: Unlike any other session of the engine; the ids of the episodes begin with it.

    Returns:
        An ungraded episode per sequence. Counters: `prompt`, tokens before the second turn, and
        `cached`, how many of them the engine found in its cache.

    Raises:
        EngineFault: The engine failed in one of them, or returned what does not fit together.
    """
    count = range(len(probes.prompts))
    found = await asyncio.gather(
        *(_sequence(engine, probes, index, f"{name}-{index}") for index in count),
        return_exceptions=True,
    )
    episodes = []
    for result in found:
        if isinstance(result, BaseException):
            raise result
        episodes.append(result)
    return tuple(episodes)


async def _sequence(engine: Engine, probes: ProbeSet, index: int, session: str) -> Episode:
    prompt, observation = probes.prompts[index], probes.observations[index]

    async def turn(number: int, ids: array[int]) -> Completion:
        sampling = SamplingParams(
            max_tokens=probes.tokens,
            stop_ids=(),
            temperature=probes.temperature,
            key=(probes.seed, _KEY, index, number),
        )
        said = await engine.generate(
            GenerateRequest(session=session, prompt_ids=ids, sampling=sampling)
        )
        covered = said.spans[-1].stop if said.spans else 0
        if not len(said.token_ids) == len(said.logps) == covered:
            raise EngineFault(
                field=f"completion of {session}",
                rule="of a log-prob and a span position per token",
                value=(len(said.token_ids), len(said.logps), covered),
            )
        return said

    try:
        first = await turn(0, prompt)
        context = prompt + first.token_ids + observation
        second = await turn(1, context)
    finally:
        with suppress(EngineFault):  # an engine that is gone has forgotten the session
            await engine.release(session)
    before = len(first.logps)
    sizes = (len(prompt), before, len(observation), len(second.logps))
    later = [replace(s, start=s.start + before, stop=s.stop + before) for s in second.spans]
    segment = Segment(
        token_ids=context + second.token_ids,
        action=array("b", _repeated((0, 1, 0, 1), sizes)),
        turn=array("i", _repeated((0, 0, 1, 1), sizes)),
        logp_behaviour=first.logps + second.logps,
        spans=(*first.spans, *later),
    )
    return Episode(
        id=session,
        task="probe",
        group=-1,
        member=index,
        attempt=0,
        segments=(segment,),
        turns=(),
        status=EpisodeStatus.DONE,
        reward=None,
        counters={"prompt": len(context), "cached": second.tokens_cached},
        t_submit=first.t_submit,
        t_start=first.t_start,
        t_end=second.t_end,
    )


def _repeated(values: Sequence[int], times: Sequence[int]) -> list[int]:
    return [value for value, n in zip(values, times, strict=True) for _ in range(n)]
