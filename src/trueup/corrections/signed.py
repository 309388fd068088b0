"""Methods that treat good and bad episodes differently.

Pushing down what the target no longer does is where off-policy updates break; pushing up is safe.
All read the sign of the advantage, which stands for the sign of the reward in their sources.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trueup.corrections.levels import GEOMETRIC, PRODUCT, TOKEN
from trueup.corrections.preset import Constant, Constants, Filter, Preset, Ratios, Weights
from trueup.corrections.truncated import importance_weights, unbounded
from trueup.gap import exp_clamped


def _not_stale_and_bad(ratios: Ratios, constants: Constants) -> Tensor:
    return ~((ratios.advantage < 0) & (-ratios.log_ratio > constants["delta"]))


def _within_probability(ratios: Ratios, constants: Constants) -> Tensor:
    moved = ratios.gap.logp_target.double().exp() - ratios.gap.logp_behaviour.double().exp()
    too_far_up = (ratios.advantage > 0) & (moved > constants["delta"])
    too_far_down = (ratios.advantage < 0) & (moved < -constants["delta"])
    return ~(too_far_up | too_far_down)


def _tapered_weights(ratios: Ratios, constants: Constants) -> Weights:
    tapered = exp_clamped(ratios.log_ratio.clamp(max=0))
    return Weights(weight=torch.where(ratios.advantage < 0, tapered, 1.0))


def _soft_weights(ratios: Ratios, constants: Constants) -> Weights:
    """W^k e^{λ(1−W)}, exponentiated once: what is infinite inside becomes 0."""
    d = ratios.log_ratio
    good, bad = (
        (constants[f"k_{sign}"] * d + constants[f"lambda_{sign}"] * (1 - d.exp())).exp()
        for sign in ("good", "bad")
    )
    return Weights(weight=torch.where(ratios.advantage < 0, bad, good))


def _soft_bounds(constants: Constants) -> tuple[float, float]:
    """The maximum of W^k e^{λ(1−W)} is at W = k/λ."""
    pairs = [(constants[f"k_{sign}"], constants[f"lambda_{sign}"]) for sign in ("good", "bad")]
    return 0.0, max((k / rate) ** k * math.exp(rate - k) for k, rate in pairs)


PRESETS = (
    Preset(
        name="opsm",
        level=TOKEN,
        scope="sequence",
        weight=importance_weights,
        bounds=unbounded,
        constants={
            "delta": Constant(
                default=0.1,
                meaning="δ, largest −mean d of a kept episode with A < 0, in nats",
                usual="1e-4 (slime), .05–.2 (Trinity), .5 (TRL)",
            )
        },
        filter=Filter(level=GEOMETRIC, keep=_not_stale_and_bad, signed=True),
        moving=True,
        formula="w = ρ, but an episode with A < 0 and −mean_t d_t > delta is rejected",
        meaning="Off-policy sequence masking: bad episodes that became unlikely are left alone.",
        use="As a filter beside `tis`, in asynchronous runs. The source gives δ no value.",
        source="DeepSeek-V3.2; slime; TRL",
    ),
    Preset(
        name="dppo",
        level=TOKEN,
        scope="token",
        weight=importance_weights,
        bounds=unbounded,
        constants={
            "delta": Constant(
                default=0.2, meaning="δ, largest move of the token's probability", usual=".2"
            )
        },
        filter=Filter(level=TOKEN, keep=_within_probability, signed=True),
        moving=True,
        formula="w = ρ if π − μ <= delta where A > 0 and π − μ >= −delta where A < 0, "
        "else the token is rejected",
        meaning="A trust region on probabilities: what has already moved far enough moves no more.",
        use="Where ratios of rare tokens are large although their probabilities barely differ.",
        source="arXiv 2602.04879; prime-rl",
    ),
    Preset(
        name="topr",
        level=PRODUCT,
        scope="sequence",
        weight=_tapered_weights,
        bounds=lambda constants: (0.0, 1.0),
        moving=True,
        formula="w = 1 where A >= 0, clip(ρ_seq, 0, 1) where A < 0",
        meaning="Tapered off-policy REINFORCE: good episodes are imitated, bad ones only as far as "
        "the target still produces them.",
        use="Old or foreign data; with group baselines half the weight of an old batch is lost.",
        source="arXiv 2503.14286",
    ),
    Preset(
        name="vespo",
        level=PRODUCT,
        scope="sequence",
        weight=_soft_weights,
        bounds=_soft_bounds,
        constants={
            "k_good": Constant(default=2.0, open_low=True, meaning="k where A >= 0", usual="2"),
            "lambda_good": Constant(
                default=3.0, open_low=True, meaning="λ where A >= 0", usual="3"
            ),
            "k_bad": Constant(default=3.0, open_low=True, meaning="k where A < 0", usual="3"),
            "lambda_bad": Constant(default=2.0, open_low=True, meaning="λ where A < 0", usual="2"),
        },
        moving=True,
        formula="w = W^k·e^(λ(1 − W)), W = exp(Σ_t d_t), k and λ by the sign of A",
        meaning="A smooth weight of whole episodes: 1 at W = 1, towards 0 on both sides.",
        use="Episodes of moderate length where hard cuts of `seq-mis` reject too many.",
        source="VESPO, arXiv 2602.10693",
    ),
)
