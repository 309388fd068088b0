"""Are the version labels true? A regression that sees what no mean can.

If the token of version v was really sampled by v, log μ − log π_v is the engine's error and knows
nothing of the update from v − 1 to v. If it was sampled by v − 1, the same difference *is* minus
that update. So the slope of log μ − log π_v on log π_{v−1} − log π_v over tokens is 0 where labels
are true, 1 where the engine served the version before, and in between the mislabelled share. At
small steps mean |d| is the same in all three cases, because the engine's error dominates it.

Scores must be float32: rounding that both sides share (log π_v) pulls the slope towards 1. The
standard error is that of drawing episodes. An engine that rounds its *weights* makes an error that
is the same for all tokens and may lie along the update by chance, which shifts the slope by about
(error / update) · 20/√parameters (standard deviations per token; measured with 20,000 and 665,000
parameters in bfloat16): much in a toy with tiny steps, little, by that law, in a large model.

Shapes: N action tokens, E episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the rule serves readers of recorded metrics, who need no tensors
    from torch import Tensor

    from trueup.gap import PolicyGap

MAX_ERROR = 0.25
"""Standard error above which a slope says nothing."""
TOLERANCE = 0.2
"""Slope below which labels are called true, however small its standard error."""
CERTAINTY = 4.0
"""Standard errors that a slope must be away from a hypothesis to refute it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelTest:
    """Slope with its standard error clustered by episode; 0 where it is not defined."""

    tokens: int
    """Tokens scored under their version and the one before."""
    episodes: int
    """Episodes that hold them."""
    slope: float
    standard_error: float
    """0 with fewer than two episodes or equal versions, where it does not exist."""
    update: float
    """Standard deviation of log π_{v−1} − log π_v over these tokens, in nats."""
    verdict: str
    """What the slope says, in words."""

    @property
    def decided(self) -> bool:
        """The slope is known well enough to say anything."""
        return 0 < self.standard_error <= MAX_ERROR

    @property
    def refuted(self) -> bool:
        """The labels are not true."""
        return self.decided and labels_refuted(self.slope, self.standard_error)


def labels_refuted(slope: float, standard_error: float) -> bool:
    """Whether a slope contradicts true labels."""
    return abs(slope) > max(TOLERANCE, CERTAINTY * standard_error)


def label_test(gap: PolicyGap, *, logp_before: Tensor) -> LabelTest:
    """Test the version labels of a step batch.

    Args:
        gap: The step batch; `logp_version` is finite where a token was scored.
        logp_before: [N] log π_{v−1}, float32: the trainer's numerics at the version before the
            token's own; NaN where not scored.
    """
    import torch

    version = gap.logp_version
    if version is None:
        version = torch.full_like(gap.logp_target, torch.nan)
    used = gap.valid & torch.isfinite(version) & torch.isfinite(logp_before)
    own, before, behaviour = (x[used].double() for x in (version, logp_before, gap.logp_behaviour))
    tokens, episodes, slope, error, update = regress(
        before - own, behaviour - own, gap.episode[used], gap.num_episodes
    ).tolist()
    return LabelTest(
        tokens=int(tokens),
        episodes=int(episodes),
        slope=slope,
        standard_error=error,
        update=update,
        verdict=_verdict(slope, error),
    )


def regress(x: Tensor, y: Tensor, episode: Tensor, num_episodes: int) -> Tensor:
    """Regress y on x over tokens, in float64.

    Args:
        x: [N] float64.
        y: [N] float64.
        episode: [N] int64, the cluster of each token.
        num_episodes: Clusters that there may be.

    Returns:
        Tokens, clusters with one, slope (with intercept), its standard error clustered by episode
        (0 where it does not exist), and standard deviation of x.
    """
    import torch

    count = max(len(x), 1)
    x = x - x.sum() / count
    y = y - y.sum() / count
    spread = x.square().sum()
    slope = torch.where(spread > 0, (x * y).sum() / spread, 0.0)
    score = x * (y - slope * x)
    zeros = x.new_zeros(num_episodes)
    clusters = (zeros.index_add(0, episode, torch.ones_like(x)) > 0).sum().double()
    squares = zeros.index_add(0, episode, score).square().sum()
    error = (squares * clusters / (clusters - 1).clamp(min=1)).sqrt() / spread
    defined = (clusters >= 2) & (spread > 0)
    return torch.stack(
        [
            x.new_tensor(len(x)),
            clusters,
            slope,
            # An exact fit is a finite certainty: the rounding of float32.
            torch.where(defined, error.clamp(min=1e-6), 0.0),
            (spread / count).sqrt(),
        ]
    )


def _verdict(slope: float, error: float) -> str:
    if not error:
        return "undecided: no two episodes whose tokens two different versions scored"
    if error > MAX_ERROR:
        return f"undecided: standard error {error:.2f}, more tokens or a larger update are needed"
    if not labels_refuted(slope, error):
        return "labels are true: what the engine served does not depend on the version before"
    if slope < 0:
        return "labels are not true, or the engine overshoots the update that it applies"
    if slope >= 1 - max(TOLERANCE, CERTAINTY * error):
        return "labels are false: the engine served the version before the one it claims"
    return f"labels are false for about {slope:.0%} of the tokens: sampled one version earlier"
