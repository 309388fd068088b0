"""The penalty for leaving a frozen reference policy: k3 of KL(π_θ‖π_ref), per token.

k3 = e^x − 1 − x with x = log π_ref − log π_θ of the sampled token: never negative, 0 where the
policies agree. It is not weighted by the correction, as in the methods that use it.

Shapes: N action tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.gap import exp_clamped


def reference_kl(logp: Tensor, *, logp_reference: Tensor, keep: Tensor) -> Tensor:
    """[N] k3 with gradient through log π_θ; 0 where not kept.

    Args:
        logp: [N] log π_θ.
        logp_reference: [N] log π_ref.
        keep: [N] bool.
    """
    x = torch.where(keep, logp_reference, 0.0).detach() - torch.where(keep, logp, 0.0)
    return exp_clamped(x) - 1 - x
