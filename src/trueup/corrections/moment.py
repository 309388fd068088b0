"""Rejection of the tokens that carry the second moment of the log-ratios [M2PO, 2510.01161]."""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.corrections.levels import TOKEN
from trueup.corrections.preset import Constant, Constants, Filter, Preset, Ratios
from trueup.corrections.truncated import importance_weights, unbounded


def second_moment_bound(log_ratio: Tensor, *, tau: float) -> Tensor:
    """[] the least d² that goes when the largest go until the mean of the rest is below τ.

    Infinite if none goes. Equal d² stay or go together: the order of tokens does not matter.
    """
    ordered = log_ratio.double().square().sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    ends = torch.cat([ordered, ordered.new_full((1,), torch.inf)])
    return ends[(means < tau).sum()]  # the means never decrease


def _bound(ratios: Ratios, constants: Constants) -> Tensor:
    return second_moment_bound(ratios.log_ratio[ratios.keep], tau=constants["tau"])


def _below_bound(ratios: Ratios, constants: Constants) -> Tensor:
    bound = _bound(ratios, constants) if ratios.gate is None else ratios.gate
    return ratios.keep & (ratios.log_ratio.double().square() < bound)


PRESETS = (
    Preset(
        name="m2po",
        level=TOKEN,
        scope="batch",
        weight=importance_weights,
        bounds=unbounded,
        constants={
            "tau": Constant(
                default=0.04, open_low=True, meaning="τ, mean d² below which all stay", usual=".04"
            )
        },
        filter=Filter(level=TOKEN, keep=_below_bound, gate=_bound),
        gated=True,
        moving=True,
        formula="w = ρ; the tokens of largest d² are rejected until mean d² of the rest < tau",
        meaning="Second-moment mask: few tokens are rejected, and only when the batch is far off.",
        use="Stale batches of which most tokens agree.",
        source="M2PO, arXiv 2510.01161",
    ),
)
