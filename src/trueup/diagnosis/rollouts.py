"""Completions beside their requests: what an engine said, token by token, ready to be scored.

Legend: S completions, N action tokens of all of them, in the order of the completions.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trueup.engines.base import Engine
from trueup.errors import DataError, EngineFault
from trueup.gap import PolicyGap
from trueup.models.packed import PackedBatch
from trueup.types import Completion, FinishReason, GenerateRequest, Span


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """What was asked and what came back.

    Raises:
        DataError: A completion's log-probs or spans do not cover its tokens.
    """

    requests: tuple[GenerateRequest, ...]
    completions: tuple[Completion, ...]
    """[S] one per request; log-probs are NaN where the engine returned none."""

    def __post_init__(self) -> None:
        """Refuse what would need a guard later."""
        for completion in self.completions:
            n = len(completion.token_ids)
            covered = [(span.start, span.stop) for span in completion.spans]
            joined = [stop for _, stop in covered][:-1] == [start for start, _ in covered][1:]
            whole = not n or (joined and (covered[0][0], covered[-1][1]) == (0, n))
            if len(completion.logps) != n or not (covered or not n) or not whole:
                raise DataError(
                    field=f"completion {completion.session}",
                    rule=f"of {n} log-probs and spans over all of its {n} tokens",
                    value=(len(completion.logps), covered),
                )

    @cached_property
    def packed(self) -> PackedBatch:
        """Prompts and completions as segments, every sampled token an action."""
        ids, action = [], []
        for request, completion in zip(self.requests, self.completions, strict=True):
            ids.append(request.prompt_ids + completion.token_ids)
            flags = [0] * len(request.prompt_ids) + [1] * len(completion.token_ids)
            action.append(array("b", flags))
        return PackedBatch.pack(ids, action)

    @cached_property
    def lengths(self) -> Tensor:
        """[S] int64 action tokens of each completion."""
        return torch.tensor([len(c.token_ids) for c in self.completions], dtype=torch.int64)

    @cached_property
    def row(self) -> Tensor:
        """[N] int64 completion of each token."""
        return torch.arange(len(self.lengths)).repeat_interleave(self.lengths)

    @cached_property
    def at(self) -> Tensor:
        """[N] int64 index of each token within its completion."""
        return torch.arange(len(self.row)) - (self.lengths.cumsum(0) - self.lengths)[self.row]

    @cached_property
    def token(self) -> Tensor:
        """[N] int64 sampled ids."""
        return self.packed.token_ids[self.packed.action_index]

    @cached_property
    def clusters(self) -> tuple[Tensor, Tensor]:
        """Twice [N] int64, equal for tokens behind one prompt, and for one token id.

        Arithmetic makes about the same error wherever one of them is the same.
        """
        numbers: dict[bytes, int] = {}
        prompts = [numbers.setdefault(r.prompt_ids.tobytes(), len(numbers)) for r in self.requests]
        return torch.tensor(prompts, dtype=torch.int64)[self.row], self.token

    @cached_property
    def said(self) -> Tensor:
        """[N] float64 log-probs that the engine returned; NaN where it returned none."""
        parts = [torch.tensor(c.logps, dtype=torch.float64) for c in self.completions]
        return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])

    @cached_property
    def version(self) -> Tensor:
        """[N] int64 version that each token's span names."""
        return self._of_spans([span.version for _, span in self._spans]).long()

    @cached_property
    def temperature(self) -> Tensor:
        """[N] float64 sampling temperature that each token's span names."""
        return self._of_spans([span.temperature for _, span in self._spans])

    @cached_property
    def truncated(self) -> Tensor:
        """[N] bool: the span names a truncated support."""
        return self._of_spans([s.top_p < 1 or s.top_k > 0 for _, s in self._spans]).bool()

    @cached_property
    def known(self) -> Tensor:
        """[N] bool: the engine returned a finite log-prob."""
        return torch.isfinite(self.said)

    def select(self, rows: Sequence[int]) -> Rollouts:
        """Some of the completions."""
        return Rollouts(
            requests=tuple(self.requests[i] for i in rows),
            completions=tuple(self.completions[i] for i in rows),
        )

    def joined(self, *others: Rollouts) -> Rollouts:
        """These and others, in order."""
        parts = (self, *others)
        return Rollouts(
            requests=tuple(r for part in parts for r in part.requests),
            completions=tuple(c for part in parts for c in part.completions),
        )

    def gap(self, target: Tensor, behaviour: Tensor | None = None) -> PolicyGap:
        """The gap of two sets of log-probs [N], each completion an episode of its own.

        There are no rewards: every completion is a group of one.

        Args:
            target: [N] of a scorer.
            behaviour: [N]; what the engine said by default.
        """
        count = len(self.completions)
        behaviour = self.said if behaviour is None else behaviour
        behaviour = torch.where(torch.isfinite(behaviour), behaviour, torch.nan).float()
        zeros = torch.zeros(len(self.said), dtype=torch.int64)
        return PolicyGap(
            logp_target=target.float(),
            logp_behaviour=behaviour.clamp(max=0.0),
            segment_offsets=torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)]),
            segment_episode=torch.arange(count),
            group=torch.arange(count),
            reward=torch.zeros(count),
            version=self.version,
            lag=zeros,
            engine=zeros,
        )

    def tokens_of_spans(self) -> Iterator[tuple[Span, slice]]:
        """Each span with the action tokens, of the N, that it covers."""
        start = 0
        for _, span in self._spans:
            yield span, slice(start, start + span.stop - span.start)
            start += span.stop - span.start

    @cached_property
    def _spans(self) -> list[tuple[int, Span]]:
        return [(row, span) for row, c in enumerate(self.completions) for span in c.spans]

    def _of_spans(self, values: Sequence[float]) -> Tensor:
        lengths = torch.tensor([s.stop - s.start for _, s in self._spans], dtype=torch.int64)
        return torch.tensor(values, dtype=torch.float64).repeat_interleave(lengths)


def spread(rows: Tensor, count: int) -> Tensor:
    """At most `count` of some rows, evenly from first to last."""
    last = len(rows) - 1
    return rows[torch.linspace(0, last, min(count, len(rows)), dtype=torch.float64).long()]


async def sample(
    engine: Engine, requests: Sequence[GenerateRequest], *, keep: bool = False
) -> Rollouts:
    """Let an engine serve requests, all at once; what it aborts is left out.

    Args:
        engine: Serving.
        requests: Of sessions of their own.
        keep: Let the sessions live on; else each is released as soon as it ended.

    Raises:
        EngineFault: One failed; the others are cancelled.
        DataError: See `Rollouts`.
    """

    async def one(request: GenerateRequest) -> Completion:
        try:
            return await engine.generate(request)
        finally:
            if not keep:
                await engine.release(request.session)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(request)) for request in requests]
    except* EngineFault as faults:
        raise faults.exceptions[0] from None
    ended = [(r, task.result()) for r, task in zip(requests, tasks, strict=True)]
    kept = [(r, c) for r, c in ended if c.finish is not FinishReason.ABORT]
    return Rollouts(requests=tuple(r for r, _ in kept), completions=tuple(c for _, c in kept))
