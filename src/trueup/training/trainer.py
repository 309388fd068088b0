"""The trainer: a port of three verbs, and its implementation in PyTorch.

`score` says what the weights think of tokens, `step` learns from a step batch whose correction is
already frozen, `export` hands out a version. Nothing here knows engines, episodes or schedules.

Legend: N action tokens, S segments, E episodes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from trueup.config import TrainConfig
from trueup.corrections.base import Correction
from trueup.diagnostics.metrics import Metric, metric_of, metrics_of
from trueup.gap import PolicyGap
from trueup.losses.policy import PolicyLoss, policy_loss
from trueup.losses.reduce import token_sum
from trueup.models.load import load_state, state_tensors
from trueup.models.logprobs import action_logprobs
from trueup.models.packed import MicroBatch, PackedBatch, microbatches

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did."""

    updates: int
    """Optimiser steps taken; 0 means that the weights did not change."""
    metrics: dict[str, Metric]


class Trainer(Protocol):
    """What turns a corrected step batch into a new version."""

    version: int

    def score(self, batch: PackedBatch, version: int | None = None) -> Tensor | None:
        """[N] log-probs under the current weights, or those of an earlier version.

        None if that version is not kept any more.
        """
        ...

    def step(self, batch: PackedBatch, gap: PolicyGap, correction: Correction) -> StepResult:
        """Learn; `version` grows by one if any optimiser step was taken."""
        ...

    def export(self) -> dict[str, Tensor]:
        """The tensors of the current version; they may share memory with the live weights."""
        ...


class TorchTrainer:
    """Full-parameter training of a Hugging Face causal LM in one process.

    Args:
        model: The policy; trained in place.
        settings: The `train` section.
        temperature: Sampling temperature, at which every log-prob is taken.
        seed: With the version, it orders the episodes of a step.
        version: Version of the weights as they come in.
        keep_versions: Earlier versions that can still be scored.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainConfig,
        *,
        temperature: float,
        seed: int,
        version: int = 0,
        keep_versions: int = 1,
    ) -> None:
        """Nothing is trained yet."""
        self.version = version
        self.model: Any = model
        self.optimizer = _optimizer(model, settings)
        self._settings = settings
        self._temperature = temperature
        self._seed = seed
        self._keep = keep_versions
        self._earlier: OrderedDict[int, dict[str, Tensor]] = OrderedDict()

    @torch.no_grad()
    def score(self, batch: PackedBatch, version: int | None = None) -> Tensor | None:
        """[N] log-probs in float32; the weights of an earlier version are swapped in and out."""
        if version is None or version == self.version:
            return self._logp(batch)
        if version not in self._earlier:
            return None
        current = {name: tensor.clone() for name, tensor in state_tensors(self.model).items()}
        load_state(self.model, self._earlier[version])
        try:
            return self._logp(batch)
        finally:
            load_state(self.model, current)

    def step(self, batch: PackedBatch, gap: PolicyGap, correction: Correction) -> StepResult:
        """One pass over the step batch in mini-batches of whole episodes.

        The loss of a mini-batch is (M/Z) Σ over its kept tokens, with Z of the step batch and M
        mini-batches: its expectation is the step batch's, whatever it happens to hold.
        """
        before = {name: tensor.clone() for name, tensor in state_tensors(self.model).items()}
        parts = _minibatches(gap, self._settings.minibatches, self._seed, self.version)
        losses: list[PolicyLoss] = []
        keeps: list[Tensor] = []
        advantages: list[Tensor] = []
        norms: list[Tensor] = []
        skipped = 0
        scale = correction.denominator / len(parts)
        for segments in parts:
            tokens = batch.actions_of(segments)
            if not bool(correction.keep[tokens].any()):
                continue
            self.optimizer.zero_grad(set_to_none=True)
            for micro in microbatches(batch.select(segments), self._settings.microbatch_tokens):
                index = tokens[micro.actions]
                if not bool(correction.keep[index].any()):
                    continue
                losses.append(self._backward(micro, gap, correction, index, scale))
                keeps.append(correction.keep[index])
                advantages.append(correction.advantages[index])
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.grad_clip)
            if not bool(torch.isfinite(norm)):
                skipped += 1
                continue
            norms.append(norm.detach())
            self.optimizer.step()
        if norms:
            self._remember(before)
            self.version += 1
        metrics = _update_metrics(losses, keeps, advantages, norms)
        metrics["update/skipped"] = Metric.of(skipped)
        return StepResult(updates=len(norms), metrics=metrics)

    def export(self) -> dict[str, Tensor]:
        """The live tensors by name."""
        return state_tensors(self.model)

    def _logp(self, batch: PackedBatch) -> Tensor:
        return action_logprobs(
            self.model,
            batch,
            temperature=self._temperature,
            microbatch_tokens=self._settings.microbatch_tokens,
        ).logp

    def _backward(
        self,
        micro: MicroBatch,
        gap: PolicyGap,
        correction: Correction,
        index: Tensor,
        scale: float,
    ) -> PolicyLoss:
        """Accumulate the gradient of one micro-batch, whose tokens are `index` of the N."""
        logp = action_logprobs(self.model, micro.batch, temperature=self._temperature).logp
        keep = correction.keep[index]
        loss = policy_loss(
            logp,
            logp_old=gap.logp_target[index],
            advantage=correction.advantages[index],
            weight=correction.weight[index],
            keep=keep,
            clip_low=self._settings.clip_low,
            clip_high=self._settings.clip_high,
        )
        token_sum(loss.per_token, keep, denominator=scale).backward()  # type: ignore[no-untyped-call]
        return loss

    def _remember(self, tensors: dict[str, Tensor]) -> None:
        self._earlier[self.version] = tensors
        while len(self._earlier) > self._keep:
            self._earlier.popitem(last=False)


def _optimizer(model: PreTrainedModel, settings: TrainConfig) -> torch.optim.Optimizer:
    kinds: dict[str, type[torch.optim.Adam]] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    return kinds[settings.optimizer](
        model.parameters(),
        lr=settings.lr,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
    )


def _minibatches(gap: PolicyGap, count: int, seed: int, version: int) -> list[Tensor]:
    """Segments of each mini-batch: episodes in an order that seed and version fix."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + version) % 2**63)
    order = torch.randperm(gap.num_episodes, generator=generator)
    part_of = torch.empty_like(order)
    for part, episodes in enumerate(order.tensor_split(count)):
        part_of[episodes] = part
    return [(part_of[gap.segment_episode] == part).nonzero().flatten() for part in range(count)]


def _update_metrics(
    losses: list[PolicyLoss], keeps: list[Tensor], advantages: list[Tensor], norms: list[Tensor]
) -> dict[str, Metric]:
    if not losses:
        return {}
    keep, advantage = torch.cat(keeps), torch.cat(advantages)
    metrics = metrics_of(
        {
            "update/log_ratio": (torch.cat([x.log_ratio for x in losses]), keep),
            "update/clip_high": (
                torch.cat([x.clipped_high for x in losses]),
                keep & (advantage > 0),
            ),
            "update/clip_low": (torch.cat([x.clipped_low for x in losses]), keep & (advantage < 0)),
        }
    )
    if norms:
        metrics["update/grad_norm"] = metric_of(torch.stack(norms))
    return metrics
