"""The table of policy losses.

A loss is the level at which the update's ratio is taken and a function of that ratio. To add one:
its function in a file of its own, an entry here, and its name and published bounds in
`trueup.config.CLIPS`.

Shapes: N action tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from trueup.config import TrainConfig
from trueup.losses.cispo import cispo_loss
from trueup.losses.gspo import sequence_logp
from trueup.losses.policy import PolicyLoss, policy_loss

if TYPE_CHECKING:
    from torch import Tensor


class Surrogate(Protocol):
    """A loss of the token's ratio."""

    def __call__(
        self,
        logp: Tensor,
        *,
        logp_old: Tensor,
        advantage: Tensor,
        weight: Tensor,
        keep: Tensor,
        clip_low: float,
        clip_high: float,
    ) -> PolicyLoss:
        """Terms of the tokens; see `policy_loss`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One method as data."""

    name: str
    level: Literal["token", "sequence"]
    """Of the ratio r: each token's own, or the geometric mean of its sequence."""
    surrogate: Surrogate
    formula: str
    source: str

    def terms(
        self,
        settings: TrainConfig,
        logp: Tensor,
        *,
        logp_old: Tensor,
        advantage: Tensor,
        weight: Tensor,
        keep: Tensor,
        sequence: Tensor,
    ) -> PolicyLoss:
        """Terms of the tokens, with the bounds of the settings.

        Args:
            settings: The `train` section.
            logp: [N] log π_θ, with gradient.
            logp_old: [N] log π_old.
            advantage: [N] A.
            weight: [N] w ≥ 0.
            keep: [N] bool.
            sequence: [N] the sequence of each token; whole sequences only.
        """
        options: dict[str, Any] = {"dual_clip": settings.dual_clip} if settings.dual_clip else {}
        if self.level == "sequence":
            logp = sequence_logp(logp, logp_old=logp_old, keep=keep, sequence=sequence)
        return self.surrogate(
            logp,
            logp_old=logp_old,
            advantage=advantage,
            weight=weight,
            keep=keep,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            **options,
        )


_LOSSES = (
    Loss(
        name="ppo",
        level="token",
        surrogate=policy_loss,
        formula="−w · min(r A, clip(r, 1 − ε_lo, 1 + ε_hi) A); dual clip: at least c A where A < 0",
        source="PPO 1707.06347, decoupled 2110.00641, dual clip 1912.09729",
    ),
    Loss(
        name="gspo",
        level="sequence",
        surrogate=policy_loss,
        formula="as ppo, with r = exp(mean of log π_θ/π_old over the sequence)",
        source="GSPO 2507.18071",
    ),
    Loss(
        name="cispo",
        level="token",
        surrogate=cispo_loss,
        formula="−w · sg(clip(r, 1 − ε_lo, 1 + ε_hi)) · A · log π_θ",
        source="MiniMax-M1 2506.13585",
    ),
)

LOSSES: Mapping[str, Loss] = {loss.name: loss for loss in _LOSSES}
"""Every loss by the name that `train.loss` knows it by."""
