"""The one place where padded [B, T] tensors are packed into a gap, and its results padded again.

Only positions that hold an action token are read. The others (prompt, padding, tools' answers) may
hold anything, NaN included: they are not selected, so they cannot leak into a ratio, a mean or a
baseline. Packing costs one read of each tensor; all arithmetic then runs on the action tokens.

Shapes: B rows (one episode each), T positions, N action tokens in row-major order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.corrections import compose
from trueup.corrections.base import Correction
from trueup.corrections.cause import Cause
from trueup.corrections.method import Filters
from trueup.corrections.preset import Preset
from trueup.corrections.table import find
from trueup.diagnostics.metrics import Metric
from trueup.errors import DataError
from trueup.gap import PolicyGap

UNKNOWN_VERSION = -1
"""Version of tokens whose framework does not say which weights sampled them."""

_OF_REWARDS = frozenset({"kept/positive_reward", "kept/other_reward", "kept/episode_reward"})
"""Metrics that need rewards; here only advantages are known."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the action tokens of a padded batch are."""

    shape: tuple[int, int]
    """(B, T)."""
    position: Tensor
    """[N] int64 index of each action token in the flattened batch."""
    length: Tensor
    """[B] int64 action tokens of each row."""

    @classmethod
    def of(cls, mask: Tensor) -> Layout:
        """Read a mask of any dtype that is 1 at action tokens and 0 elsewhere.

        Raises:
            DataError: It is not [B, T], or holds something else than 0 and 1.
        """
        if mask.dim() != 2:
            raise DataError(field="mask", rule="of shape [B, T]", value=tuple(mask.shape))
        chosen = mask != 0
        if mask.dtype != torch.bool and not torch.equal(chosen.to(mask.dtype), mask):
            raise DataError(field="mask", rule="0 or 1 everywhere", value="something else")
        rows, width = mask.shape
        position = chosen.flatten().nonzero().squeeze(1)
        ends = torch.arange(rows + 1, device=mask.device) * width
        return cls(
            shape=(rows, width),
            position=position,
            length=torch.searchsorted(position, ends).diff(),
        )

    def pack(self, values: Tensor, *, field: str) -> Tensor:
        """[B, T] or [B] values as [N]; those of a row are repeated for each of its tokens.

        Args:
            values: The padded values.
            field: Their name in an error.

        Raises:
            DataError: The shape is neither.
        """
        if tuple(values.shape) == self.shape:
            return values.reshape(-1).index_select(0, self.position)
        if tuple(values.shape) == self.shape[:1]:
            return values.repeat_interleave(self.length)
        rule = f"of shape {list(self.shape)} or [{self.shape[0]}]"
        raise DataError(field=field, rule=rule, value=tuple(values.shape))

    def constant(self, value: int) -> Tensor:
        """[N] int64 of one value, in the memory of one element."""
        return self.position.new_full((1,), value).expand(len(self.position))

    def unpack(self, values: Tensor, *, fill: float = 0.0) -> Tensor:
        """[N] values as [B, T], with `fill` where there is no action token."""
        padded = values.new_full((self.shape[0] * self.shape[1],), fill)
        return padded.index_copy_(0, self.position, values).view(self.shape)


def pack(
    layout: Layout,
    *,
    target: Tensor,
    behaviour: Tensor,
    reward: Tensor,
    group: Tensor | None = None,
    version: Tensor | None = None,
    trainer_version: int | None = None,
    engine: Tensor | None = None,
    logp_version: Tensor | None = None,
    turn: Tensor | None = None,
) -> PolicyGap:
    """A padded step batch as a gap.

    Args:
        layout: Where its action tokens are.
        target: [B, T] float32 log π_old.
        behaviour: [B, T] float32 log μ; NaN where the engine returned none.
        reward: [B] float32 reward, or the advantage that another trainer made of it.
        group: [B] int64, equal for rows of one prompt; None: each row is its own group.
        version: [B] or [B, T] int64 version that sampled; None: unknown, and no lag means anything.
        trainer_version: The trainer's version at the start of the step; needed with `version`.
        engine: [B] or [B, T] int64 index of the engine; None: there is one.
        logp_version: [B, T] float32 log π_v, NaN where not scored.
        turn: [B, T] int64 turn of the token within its row.

    Raises:
        DataError: Shapes do not fit, or what a gap refuses.
    """
    rows = layout.shape[0]
    if tuple(reward.shape) != (rows,):
        raise DataError(field="reward", rule=f"of shape [{rows}]", value=tuple(reward.shape))
    device = layout.position.device
    if version is None:
        sampled, lag = layout.constant(UNKNOWN_VERSION), layout.constant(0)
    elif trainer_version is None:
        raise DataError(field="trainer_version", rule="given with version", value=None)
    else:
        sampled = layout.pack(version.long(), field="version")
        lag = trainer_version - sampled
    optional = {"logp_version": logp_version, "turn": turn}
    return PolicyGap(
        logp_target=layout.pack(target.detach(), field="target"),
        logp_behaviour=layout.pack(behaviour.detach(), field="behaviour"),
        segment_offsets=torch.cat([layout.length.new_zeros(1), layout.length.cumsum(0)]),
        segment_episode=torch.arange(rows, device=device),
        group=torch.arange(rows, device=device) if group is None else group.long(),
        reward=reward.detach(),
        version=sampled,
        lag=lag,
        engine=layout.constant(0) if engine is None else layout.pack(engine.long(), field="engine"),
        **{k: layout.pack(v.detach(), field=k) for k, v in optional.items() if v is not None},
    )


@dataclass(frozen=True, kw_only=True)
class Applied:
    """A correction as a padded trainer consumes it, detached."""

    advantages: Tensor
    """[B, T] float32 w_t·A_t; 0 where a token is rejected or is no action token."""
    unweighted: Tensor
    """[B, T] float32 A_t, for trainers that take weights apart; 0 without action token."""
    weight: Tensor
    """[B, T] float32 w_t ≥ 0; 0 likewise."""
    keep: Tensor
    """[B, T] bool: an action token in the loss."""
    metrics: Mapping[str, Metric]
    """Raw and applied; none of rewards, and without `gap/lag` if versions are unknown."""
    layout: Layout
    """Where the tokens of `gap` are."""
    gap: PolicyGap
    """The packed step batch, for diagnostics."""
    correction: Correction
    """The decision on the packed tokens."""


def apply(
    advantages: Tensor,
    *,
    target: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    preset: str | Preset,
    params: Mapping[str, float] | None = None,
    group: Tensor | None = None,
    version: Tensor | None = None,
    trainer_version: int | None = None,
    engine: Tensor | None = None,
    logp_version: Tensor | None = None,
    turn: Tensor | None = None,
    filters: Filters | None = None,
    on: Cause = "total",
    normalize: bool = False,
) -> Applied:
    """Weight the advantages of any trainer: w ≥ 0 commutes with PPO's minimum.

    Hand over the whole step batch at once, before it is split: presets may look at all of it.
    Where a filter rejects whole episodes, the advantages of their groups are centred anew without
    them; all others stay as they are, bit for bit.

    Args:
        advantages: [B] or [B, T] float32.
        target: [B, T] float32 log π_old, at the sampling temperature.
        behaviour: [B, T] float32 log μ; NaN where the engine returned none, never 0.
        mask: [B, T], 1 at action tokens.
        preset: Name in the table of presets, or one of your own.
        params: Overrides of its constants.
        group: [B] int64; None: rejected episodes stay in the baselines of the others.
        version: [B] or [B, T] int64; None: unknown.
        trainer_version: The trainer's version; needed with `version`.
        engine: [B] or [B, T] int64; None: there is one.
        logp_version: [B, T] float32 log π_v, NaN where not scored; for attribution.
        turn: [B, T] int64 turn of the token within its row; for presets of turns.
        filters: Presets whose filters come before the preset, with overrides of their constants.
        on: The part of the gap that is corrected.
        normalize: Divide the weights by their mean over the kept tokens.

    Raises:
        ConfigError: The preset or a constant is unknown, or a constant is out of range.
        DataError: A shape, dtype or value is wrong.
    """
    layout = Layout.of(mask)
    per_token = layout.pack(advantages.detach(), field="advantages")
    per_row = advantages.detach() if advantages.dim() == 1 else _row_mean(per_token, layout)
    gap = pack(
        layout,
        target=target,
        behaviour=behaviour,
        reward=torch.where(layout.length > 0, per_row, 0.0),
        group=group,
        version=version,
        trainer_version=trainer_version,
        engine=engine,
        logp_version=logp_version,
        turn=turn,
    )
    correction = compose.apply(
        gap,
        find(preset) if isinstance(preset, str) else preset,
        params=params or {},
        advantage="group",
        given=per_token,
        zero_variance="keep",
        denominator="all",
        max_lag=None,
        filters=filters,
        on=on,
        normalize=normalize,
    )
    weighted = torch.where(correction.keep, correction.advantages * correction.weight, 0.0)
    unknown = _OF_REWARDS | ({"gap/lag"} if version is None else set())
    return Applied(
        advantages=layout.unpack(weighted),
        unweighted=layout.unpack(correction.advantages),
        weight=layout.unpack(correction.weight),
        keep=layout.unpack(correction.keep, fill=False),
        metrics={k: v for k, v in correction.metrics.items() if k not in unknown},
        layout=layout,
        gap=gap,
        correction=correction,
    )


def _row_mean(per_token: Tensor, layout: Layout) -> Tensor:
    rows = torch.arange(layout.shape[0], device=per_token.device).repeat_interleave(layout.length)
    sums = per_token.new_zeros(layout.shape[0]).index_add(0, rows, per_token)
    return sums / layout.length.clamp(min=1)
