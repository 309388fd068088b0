"""The gap between the policy that sampled and the policy that learns, as packed action tokens.

Shapes: N action tokens of a step batch, S segments, E episodes. Nothing is padded: what is not an
action token is not here, so no padding value can leak into a ratio, a mean or a gradient. Tokens
are ordered by episode, then segment, then position.

Log-ratios are always target − behaviour: d = log π_old − log μ.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trueup.errors import DataError

LOG_RATIO_LIMIT = 20.0
"""A log-ratio is clamped to ± this where it is exponentiated, and nowhere else."""


def exp_clamped(log_ratio: Tensor) -> Tensor:
    """e^x with x clamped to ±`LOG_RATIO_LIMIT`: finite in float32, and its square in float64."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp_()


def distinct(values: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct values in ascending order, and for each element the index of its value."""
    ordered, index = values.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    return ordered, index


def run_sums(values: Tensor, length: Tensor) -> Tensor:
    """[S] float64 sums over consecutive runs of values [N] of any dtype; 0 for an empty run.

    Args:
        values: [N], on any device.
        length: [S] int64, N in all.
    """
    values = values.detach()
    if values.device.type != "cpu":
        return torch.segment_reduce(values.double(), "sum", lengths=length, unsafe=True)
    # Several times faster than a scatter, because runs are contiguous and need no copy in float64.
    full = length > 0
    sums = torch.zeros(len(length), dtype=torch.float64)
    if len(values):
        starts = (length.cumsum(0) - length)[full]
        found = np.add.reduceat(values.numpy(), starts.numpy(), dtype=np.float64)
        sums[full] = torch.from_numpy(found)
    return sums


@dataclass(frozen=True, kw_only=True)
class PolicyGap:
    """Log-probs of a step batch under behaviour and target, with the provenance of every token.

    Validated once, here; every diagnostic and correction may then compute without guards.

    Raises:
        DataError: A shape, dtype or range is wrong, an offset decreases, a target log-prob is not
            finite, or a behaviour log-prob is +inf or above 0 by more than rounding.
    """

    logp_target: Tensor
    """[N] log π_old, float32: trainer at the start of the update, at the sampling temperature."""
    logp_behaviour: Tensor
    """[N] log μ, float32; NaN where the engine returned none."""
    segment_offsets: Tensor
    """[S+1] int64: segment s holds tokens segment_offsets[s] : segment_offsets[s+1]."""
    segment_episode: Tensor
    """[S] int64, non-decreasing: the episode of each segment."""
    group: Tensor
    """[E] int64: equal for episodes of one task's group."""
    reward: Tensor
    """[E] float32, finite: only graded episodes are here."""
    version: Tensor
    """[N] int64: weight version that sampled the token."""
    lag: Tensor
    """[N] int64 ≥ 0: trainer's version at the start of the step − version."""
    engine: Tensor
    """[N] int64: index of the engine."""
    logp_version: Tensor | None = None
    """[N] log π_v, float32: trainer's numerics at the token's own version; NaN if not scored."""
    logp_cache: Tensor | None = None
    """[N] log π_v^cache, float32: the same behind keys and values of the versions that wrote the
    engine's cache; equal to log π_v where that is its own; NaN if not scored."""
    turn: Tensor | None = None
    """[N] int64 turn of the token within its episode; the tokens of a turn are adjacent."""

    def __post_init__(self) -> None:
        """Refuse what would need a guard later."""
        n, e = self.num_tokens, self.num_episodes
        for name in ("logp_target", "logp_behaviour", "reward", "logp_version", "logp_cache"):
            _check(name, getattr(self, name), e if name == "reward" else n, torch.float32)
        of_size = (("version", n), ("lag", n), ("engine", n), ("turn", n), ("group", e))
        for name, size in of_size:
            _check(name, getattr(self, name), size, torch.int64)
        _check("segment_offsets", self.segment_offsets, None, torch.int64)
        _check("segment_episode", self.segment_episode, len(self.segment_offsets) - 1, torch.int64)
        steps = self.segment_offsets.diff()
        ends_right = len(steps) == 0 or (
            self.segment_offsets[0] == 0 and self.segment_offsets[-1] == n
        )
        if not ends_right or bool((steps < 0).any()):
            raise DataError(field="segment_offsets", rule="non-decreasing from 0 to N", value=n)
        order = self.segment_episode
        if len(order) and (bool((order.diff() < 0).any()) or order[0] < 0 or order[-1] >= e):
            raise DataError(
                field="segment_episode", rule=f"sorted within [0, {e})", value=order.tolist()
            )
        if n and bool((self.lag < 0).any()):
            raise DataError(
                field="lag", rule=">= 0 (no version from the future)", value=int(self.lag.min())
            )
        if not bool((self.logp_target.abs() < torch.inf).all()):
            raise DataError(field="logp_target", rule="finite", value="a NaN or infinity")
        if not bool(torch.isfinite(self.reward).all()):
            raise DataError(field="reward", rule="finite", value=self.reward.tolist())
        if bool((self.logp_behaviour > 1e-3).any()):
            raise DataError(
                field="logp_behaviour",
                rule="<= 0",
                value=float(self.logp_behaviour.nan_to_num().max()),
            )

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.logp_target)

    @property
    def num_episodes(self) -> int:
        """E."""
        return len(self.reward)

    @cached_property
    def episode(self) -> Tensor:
        """[N] index of each token's episode."""
        return self.segment_episode.repeat_interleave(self.segment_offsets.diff())

    @cached_property
    def length(self) -> Tensor:
        """[E] int64 action tokens of each episode."""
        zeros = torch.zeros_like(self.group)
        return zeros.index_add(0, self.segment_episode, self.segment_offsets.diff())

    def episode_sum(self, values: Tensor) -> Tensor:
        """[E] float64 sum over each episode of a value or flag per token [N]."""
        return run_sums(values, self.length)

    def per_token(self, values: Tensor) -> Tensor:
        """[N] the value of each token's episode, from [E]."""
        return values.repeat_interleave(self.length, output_size=self.num_tokens)

    @cached_property
    def valid(self) -> Tensor:
        """[N] bool: the behaviour log-prob is known (finite)."""
        return self.logp_behaviour.abs() < torch.inf

    @cached_property
    def log_ratio(self) -> Tensor:
        """[N] d = log π_old − log μ; 0 where invalid (select with `valid`, never multiply)."""
        d = self.logp_target - self.logp_behaviour
        return torch.where(self.valid, d, 0.0)

    def select(self, tokens: Tensor) -> PolicyGap:
        """The gap of some of its tokens (indices, increasing); every episode and group stays."""
        sizes = self.segment_offsets.diff()
        segment = torch.arange(len(sizes)).repeat_interleave(sizes)[tokens]
        here = torch.bincount(segment, minlength=len(sizes))
        kept = {"segment_offsets", "segment_episode", "group", "reward"}
        parts: dict[str, Tensor | None] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            whole = value is None or item.name in kept
            parts[item.name] = value if whole else value[tokens]
        parts["segment_offsets"] = torch.cat([here.new_zeros(1), here.cumsum(0)])
        return PolicyGap(**parts)  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> PolicyGap:
        """The same gap on another device."""
        moved = {}
        for item in fields(self):
            value = getattr(self, item.name)
            moved[item.name] = value.to(device) if isinstance(value, Tensor) else value
        return PolicyGap(**moved)


def _check(name: str, value: Tensor | None, size: int | None, dtype: torch.dtype) -> None:
    if value is None:
        return
    if value.dim() != 1 or (size is not None and len(value) != size):
        want = "one dimension" if size is None else f"of shape [{size}]"
        raise DataError(field=name, rule=want, value=tuple(value.shape))
    if value.dtype != dtype:
        raise DataError(field=name, rule=f"of dtype {dtype}", value=str(value.dtype))
