"""The trainer's side: its forward, and what the embedded engine makes of the same tokens.

Legend: N tokens of all replies.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueup.config import EngineConfig, from_dict
from trueup.engines.base import Engine
from trueup.engines.table import factory
from trueup.errors import ConfigError, EngineFault
from trueup.gap import PolicyGap
from trueup.models.load import load_model, load_state, state_tensors
from trueup.models.logprobs import action_logprobs
from trueup.models.packed import PackedBatch
from trueup.sync.digest import digest
from trueup.sync.inprocess import InProcessTransport
from trueup.testing.protocol import NotExpressible
from trueup.types import Completion, GenerateRequest, SamplingParams

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Replies at temperature 1, with their prompts."""

    prompts: Sequence[array[int]]
    said: Sequence[Completion]


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Replies under the trainer."""

    gap: PolicyGap
    """One episode per reply."""
    entropy: Tensor
    """[N] of the trainer's distribution at each position, in nats."""

    @property
    def off(self) -> Tensor:
        """[N'] |d| of the tokens with a log-prob."""
        return self.gap.log_ratio[self.gap.valid].abs()


class Scorer:
    """A causal LM in float32.

    Args:
        directory: Hugging Face directory.
    """

    def __init__(self, directory: Path) -> None:
        """Read the model."""
        self.directory = directory
        self._model = load_model(directory)
        self.base: Weights = {name: x.clone() for name, x in state_tensors(self._model).items()}
        """The directory's weights, float32."""

    @torch.no_grad()
    def score(self, weights: Weights, asked: Asked) -> Scored:
        """Score replies at temperature 1 under weights of any precision."""
        load_state(self._model, {name: x.float() for name, x in weights.items()})
        prompts, said = asked.prompts, asked.said
        scores = action_logprobs(self._model, _packed(prompts, said), entropy=True)
        assert scores.entropy is not None
        lengths = torch.tensor([len(reply.token_ids) for reply in said])
        versions = [s.version for r in said for s in r.spans for _ in range(s.start, s.stop)]
        zeros = torch.zeros(len(said), dtype=torch.int64)
        gap = PolicyGap(
            logp_target=scores.logp,
            logp_behaviour=_logps(said),
            segment_offsets=torch.cat([zeros[:1], lengths.cumsum(0)]),
            segment_episode=torch.arange(len(said)),
            group=zeros,
            reward=zeros.float(),
            version=torch.tensor(versions),
            lag=torch.zeros(len(versions), dtype=torch.int64),
            engine=torch.zeros(len(versions), dtype=torch.int64),
        )
        return Scored(gap=gap, entropy=scores.entropy)

    async def floor(self, weights: Weights, asked: Asked, precision: str) -> float:
        """Mean |d| in nats that the embedded engine has on the same tokens at a precision.

        Raises:
            NotExpressible: It does not compute in that precision.
        """
        engine, transport = _embedded(self.directory, precision)
        try:
            await engine.load(transport.publish(0, published(weights, precision)))
            forced = await asyncio.gather(
                *(
                    _forced(engine, f"floor-{i}", prompt, reply.token_ids)
                    for i, (prompt, reply) in enumerate(zip(asked.prompts, asked.said, strict=True))
                )
            )
        except EngineFault as fault:
            raise NotExpressible(f"no floor known for {precision}: {fault}") from fault
        finally:
            await engine.close()
        target = self.score(weights, asked).gap.logp_target
        return float((target - _logps(forced)).abs().mean())


def published(tensors: Weights, precision: str) -> dict[str, Tensor]:
    """Weights as an engine of a precision wants them: rounded, unless it quantises them itself."""
    dtype: torch.dtype = torch.float32 if "+" in precision else getattr(torch, precision)
    return {name: x.to(dtype) for name, x in tensors.items()}


def engine_config(precision: str, **more: Any) -> EngineConfig:
    """The section `engine` that belongs to a precision.

    Raises:
        ConfigError: There is no such precision.
    """
    dtype, _, grid = precision.partition("+")
    return from_dict({"engine": {"dtype": dtype, "quantize": grid or "none", **more}}).engine


def _embedded(directory: Path, precision: str) -> tuple[Engine, InProcessTransport]:
    transport = InProcessTransport()
    try:
        engine = factory("embedded")(
            engine_config(precision, slots=8),
            model=directory,
            engine_id="floor",
            epoch=0,
            fetch=transport.fetch,
            digest=digest,
            paced=False,
        )
    except (ConfigError, EngineFault) as error:
        raise NotExpressible(f"no floor known for {precision}: {error}") from error
    return engine, transport


async def _forced(engine: Engine, session: str, prompt: array[int], ids: array[int]) -> Completion:
    """Decode given tokens and give the slot back."""
    sampling = SamplingParams(max_tokens=len(ids), stop_ids=())
    said = await engine.generate(
        GenerateRequest(session=session, prompt_ids=prompt, sampling=sampling, forced_ids=ids)
    )
    await engine.release(session)
    return said


def _packed(prompts: Sequence[array[int]], said: Sequence[Completion]) -> PackedBatch:
    return PackedBatch.pack(
        [prompt + reply.token_ids for prompt, reply in zip(prompts, said, strict=True)],
        [
            array("b", [0] * len(prompt) + [1] * len(reply.token_ids))
            for prompt, reply in zip(prompts, said, strict=True)
        ],
    )


def _logps(said: Sequence[Completion]) -> Tensor:
    return torch.tensor([logp for reply in said for logp in reply.logps], dtype=torch.float32)
