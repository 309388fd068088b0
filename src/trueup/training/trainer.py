"""The trainer: a port of three verbs, and its implementation in PyTorch.

`score` says what the weights think of tokens, `step` learns from a step batch and its correction,
`export` hands out a version. Nothing here knows engines, episodes or schedules.

Legend: N action tokens, S segments, E episodes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from trueup.config import TrainConfig
from trueup.corrections.controllers import learning_rate_factor
from trueup.diagnostics.metrics import Metric, metrics_of
from trueup.gap import run_sums
from trueup.losses.kl import reference_kl
from trueup.losses.policy import PolicyLoss
from trueup.losses.reduce import aggregation, token_sum
from trueup.losses.table import LOSSES
from trueup.models.hybrid import hybrid_logprobs
from trueup.models.load import borrowed_state, state_tensors
from trueup.models.logprobs import action_logprobs
from trueup.models.packed import MicroBatch, PackedBatch, microbatches
from trueup.training.corrected import Corrected, LossTokens

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

    def score_behind_cache(self, batch: PackedBatch, writer: Tensor) -> Tensor:
        """[N] log-probs behind keys and values that several versions wrote (`models.hybrid`).

        Args:
            batch: Segments.
            writer: [T] version that computed each position.

        Returns:
            NaN in segments that need a version which is not kept any more.
        """
        ...

    def step(self, batch: PackedBatch, corrected: Corrected) -> StepResult:
        """Learn; `version` grows by one if any optimiser step was taken."""
        ...

    def export(self) -> dict[str, Tensor]:
        """The tensors of the current version; they may share memory with the live weights."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What a micro-batch added to the gradient."""

    loss: PolicyLoss
    tokens: LossTokens
    kl: Tensor | None
    """[n] k3 to the reference."""


class TorchTrainer:
    """Full-parameter training of a Hugging Face causal LM in one process.

    Memory: the weights, their gradient, two moments, `keep_versions` copies of the weights, and the
    activations of one micro-batch.

    Args:
        model: The policy; trained in place.
        settings: The `train` section.
        temperature: Sampling temperature, at which every log-prob is taken.
        seed: With the version, it orders the episodes of a step.
        version: Version of the weights as they come in.
        keep_versions: Earlier versions that can still be scored; 0 copies nothing.
        reference: Tensors of the policy of the KL penalty; the weights as they come in if None.
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
        reference: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Nothing is trained yet."""
        self.version = version
        self.model: Any = model
        self.optimizer = _optimizer(model, settings)
        self.settings = settings
        self._loss = LOSSES[settings.loss]
        self._temperature = temperature
        # The parameters' own dtype needs no cast, float64 of a test included.
        self._dtype = torch.bfloat16 if settings.dtype == "bfloat16" else None
        self._seed = seed
        self._keep = keep_versions
        self._earlier: OrderedDict[int, Mapping[str, Tensor]] = OrderedDict()
        self.reference = (reference or self._copy()) if settings.kl_beta else None
        """Tensors of the policy of the KL penalty, if there is one."""

    def score(self, batch: PackedBatch, version: int | None = None) -> Tensor | None:
        """[N] log-probs in float32; the weights of an earlier version are borrowed for it."""
        if version is None or version == self.version:
            return self._logp(batch)
        if version not in self._earlier:
            return None
        return self._logp_under(self._earlier[version], batch)

    def score_behind_cache(self, batch: PackedBatch, writer: Tensor) -> Tensor:
        """See `Trainer.score_behind_cache`."""
        kept = torch.tensor([self.version, *self._earlier])
        missing = run_sums(torch.isin(writer, kept, invert=True).long(), batch.lengths)
        whole = missing == 0
        segments = torch.nonzero(whole)[:, 0]
        logp = torch.full((len(batch.action_index),), torch.nan)
        if len(segments):
            logp[batch.actions_of(segments)] = hybrid_logprobs(
                self.model,
                batch.select(segments),
                writer[whole.repeat_interleave(batch.lengths)],
                under=self._under,
                temperature=self._temperature,
                dtype=self._dtype,
            )
        return logp

    def step(self, batch: PackedBatch, corrected: Corrected) -> StepResult:
        """One pass over the step batch in mini-batches of whole episodes.

        The loss of a mini-batch is (M/Z) Σ over its kept tokens, with Z of the step batch and M
        mini-batches: its expectation is the step batch's, whatever it happens to hold. Gradients
        are summed first and divided by Z last, because a fused step knows Z only then.
        """
        before = self._snapshot() if self._keep else None
        reference = self._logp_under(self.reference, batch) if self.reference is not None else None
        minibatches = _minibatches(corrected, self.settings.minibatches, self._seed, self.version)
        parts: list[_Part] = []
        norms: list[Tensor] = []
        skipped = 0
        for segments in minibatches:
            self.optimizer.zero_grad(set_to_none=True)
            here = self._accumulate(batch, segments, corrected, reference)
            parts += here
            if not any(bool(part.tokens.keep.any()) for part in here):
                continue
            self._scale_gradient(len(minibatches) / self._denominator(corrected))
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)
            if not bool(torch.isfinite(norm)):
                skipped += 1
                continue
            norms.append(norm.detach())
            self._set_learning_rate(corrected)
            self.optimizer.step()
        if norms:
            if before is not None:
                self._earlier[self.version] = before
            self.version += 1
        metrics = _update_metrics(parts, norms)
        metrics["update/skipped"] = Metric.of(skipped)
        if norms:
            metrics["update/learning_rate"] = Metric.of(self.optimizer.param_groups[0]["lr"])
        return StepResult(updates=len(norms), metrics=metrics)

    def export(self) -> dict[str, Tensor]:
        """The live tensors by name."""
        return state_tensors(self.model)

    def _copy(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in state_tensors(self.model).items()}

    def _snapshot(self) -> Mapping[str, Tensor]:
        """A copy of the weights, in the memory of the oldest version if there are enough."""
        if len(self._earlier) < self._keep:
            return self._copy()
        _, oldest = self._earlier.popitem(last=False)
        for name, tensor in state_tensors(self.model).items():
            oldest[name].copy_(tensor)
        return oldest

    @torch.no_grad()
    def _logp(self, batch: PackedBatch) -> Tensor:
        return self._forward(batch)

    def _under(self, version: int) -> AbstractContextManager[object]:
        """The weights of a kept version, as long as the context lasts."""
        if version == self.version:
            return nullcontext()
        return borrowed_state(self.model, self._earlier[version])

    def _logp_under(self, tensors: Mapping[str, Tensor], batch: PackedBatch) -> Tensor:
        """[N] log-probs under other weights."""
        with borrowed_state(self.model, tensors):
            return self._logp(batch)

    def _forward(self, batch: PackedBatch) -> Tensor:
        """[N] log-probs in float32, differentiable."""
        return action_logprobs(
            self.model,
            batch,
            temperature=self._temperature,
            microbatch_tokens=self.settings.microbatch_tokens,
            dtype=self._dtype,
        ).logp

    def _accumulate(
        self,
        batch: PackedBatch,
        segments: Tensor,
        corrected: Corrected,
        reference: Tensor | None,
    ) -> list[_Part]:
        """Add the gradient of Z times the loss of these segments, a micro-batch at a time."""
        tokens = batch.actions_of(segments)
        unit = corrected.unit[segments] if corrected.unit is not None else None
        size = self.settings.microbatch_tokens
        parts: list[_Part] = []
        for micro in microbatches(batch.select(segments), size, unit=unit):
            index = tokens[micro.actions]
            if corrected.wants(index):
                parts.append(self._backward(micro, index, corrected, reference))
        return parts

    def _backward(
        self, micro: MicroBatch, index: Tensor, corrected: Corrected, reference: Tensor | None
    ) -> _Part:
        """Add the gradient of one micro-batch, whose tokens are `index` of the N."""
        logp = self._forward(micro.batch)
        tokens = corrected.tokens(index, logp.detach())
        sizes = micro.batch.action_offsets.diff()
        loss = self._loss.terms(
            self.settings,
            logp,
            logp_old=tokens.logp_old,
            advantage=tokens.advantage,
            weight=tokens.weight,
            keep=tokens.keep,
            sequence=torch.arange(len(sizes)).repeat_interleave(sizes),
        )
        terms, kl = loss.per_token, None
        if reference is not None:
            kl = reference_kl(logp, logp_reference=reference[index], keep=tokens.keep)
            terms = terms + self.settings.kl_beta * kl
        if bool(tokens.keep.any()):
            total = token_sum(tokens.share * terms, tokens.keep, denominator=1.0)
            total.backward()  # type: ignore[no-untyped-call]
        return _Part(loss=loss, tokens=tokens, kl=None if kl is None else kl.detach())

    def _denominator(self, corrected: Corrected) -> float:
        return aggregation(
            self.settings.aggregation,
            counted=corrected.correction.counts,
            episode=corrected.gap.episode,
            num_episodes=corrected.num_episodes,
            constant=self.settings.sequence_constant,
        ).denominator

    def _scale_gradient(self, factor: float) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _set_learning_rate(self, corrected: Corrected) -> None:
        if self.settings.lr_ess:
            factor = learning_rate_factor(corrected.correction.metrics)
            for group in self.optimizer.param_groups:
                group["lr"] = self.settings.lr * factor


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


def _minibatches(corrected: Corrected, count: int, seed: int, version: int) -> list[Tensor]:
    """Segments of each mini-batch: episodes in an order that seed and version fix."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + version) % 2**63)
    order = torch.randperm(corrected.num_episodes, generator=generator)
    part_of = torch.empty_like(order)
    for part, episodes in enumerate(order.tensor_split(count)):
        part_of[episodes] = part
    return [
        (part_of[corrected.segment_episode] == part).nonzero().flatten() for part in range(count)
    ]


def _update_metrics(parts: Sequence[_Part], norms: list[Tensor]) -> dict[str, Metric]:
    if not parts:
        return {}
    losses = [part.loss for part in parts]
    keep = torch.cat([part.tokens.keep for part in parts])
    advantage = torch.cat([part.tokens.advantage for part in parts])
    values: dict[str, Tensor | tuple[Tensor, Tensor | None]] = {
        "update/log_ratio": (torch.cat([x.log_ratio for x in losses]), keep),
        "update/clip_high": (torch.cat([x.clipped_high for x in losses]), keep & (advantage > 0)),
        "update/clip_low": (torch.cat([x.clipped_low for x in losses]), keep & (advantage < 0)),
    }
    if norms:
        values["update/grad_norm"] = torch.stack(norms)
    kls = [part.kl for part in parts if part.kl is not None]
    if kls:
        values["update/reference_kl"] = (torch.cat(kls), keep)
    return metrics_of(values)
