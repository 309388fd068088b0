"""Importance weights from above: as they are, or capped.

Truncation [TIS, Yao et al. 2025] bounds the second moment of a weighted term by C² times that of
the unweighted one and leaves the bias of what it cuts off. Small weights are not raised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.corrections.preset import Constants, Ratios, Weights
from trueup.gap import exp_clamped


def importance(log_ratio: Tensor) -> Tensor:
    """ρ = e^d, d clamped to ±20."""
    return exp_clamped(log_ratio)


def truncated(log_ratio: Tensor, *, cap: float) -> Tensor:
    """min(ρ, C)."""
    return exp_clamped(log_ratio).clamp(max=cap)


def uncorrected_weights(ratios: Ratios, constants: Constants) -> Weights:
    """1 for every token."""
    return Weights(weight=torch.ones_like(ratios.log_ratio))


def importance_weights(ratios: Ratios, constants: Constants) -> Weights:
    """ρ; a filter bounds it."""
    return Weights(weight=importance(ratios.log_ratio))


def truncated_weights(ratios: Ratios, constants: Constants) -> Weights:
    """min(ρ, cap)."""
    return Weights(weight=truncated(ratios.log_ratio, cap=constants["cap"]))
