"""TRL's importance-sampling correction, written from its documented formula.

    d = (log π_old − log μ) · mask;  ratio = e^d per token, or e^(Σ d) per sequence
    truncate: min(ratio, C);  mask: ratio if ratio ≤ C, else 0

Defaults of `GRPOConfig` in TRL 1.16: mode "sequence_mask", C = 3. Nothing is clamped before the
exponential, and rows without action tokens count as ratio 1.

Shapes: B rows, T positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

VERSION = "1.16 (documented formula)"

Mode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def importance_weights(
    target: Tensor, behaviour: Tensor, mask: Tensor, *, mode: Mode = "sequence_mask", cap: float = 3
) -> tuple[Tensor, dict[str, float]]:
    """Weights [B, T] or [B, 1] and the figures that TRL logs of them."""
    d = (target - behaviour) * mask
    level, what = mode.split("_")
    ratio = (d if level == "token" else d.sum(-1, keepdim=True)).exp()
    ratio = ratio.clamp(max=cap) if what == "truncate" else ratio.masked_fill(ratio > cap, 0.0)
    selected = mask.bool()
    difference = (target - behaviour).abs()[selected]
    flat = ratio[selected] if level == "token" else ratio.flatten()
    figures = {
        "sampling_logp_difference/mean": difference.mean(),
        "sampling_logp_difference/max": difference.max(),
        "importance_sampling_ratio/min": flat.min(),
        "importance_sampling_ratio/mean": flat.mean(),
        "importance_sampling_ratio/max": flat.max(),
    }
    return ratio, {name: float(value) for name, value in figures.items()}
