"""GSPO: the clipped ratio is the sequence's geometric mean, one for all its tokens [2507.18071].

A sequence is what one forward reads, a segment: an episode has one unless its context was rebuilt.
In the form of GSPO-token the value is the sequence's and the gradient the token's, so per-token
weights and every aggregation apply as they do to the other losses; without such weights the
gradient is that of the sequence form.

Shapes: N action tokens, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_logp(logp: Tensor, *, logp_old: Tensor, keep: Tensor, sequence: Tensor) -> Tensor:
    """[N] log π_old + log s: what makes the ratio to π_old that of the sequence.

    log s is the mean of log π_θ − log π_old over the kept tokens of the sequence; a token that is
    not kept is left out, not counted as a ratio of 1.

    Args:
        logp: [N] log π_θ; its gradient passes through unchanged.
        logp_old: [N] log π_old.
        keep: [N] bool.
        sequence: [N] int64 in [0, N), equal for tokens of one sequence, all of which are here.
    """
    old = torch.where(keep, logp_old, 0.0).detach()
    new = torch.where(keep, logp, 0.0)
    zeros = old.new_zeros(len(old))
    total = zeros.index_add(0, sequence, (new - old).detach())
    count = zeros.index_add(0, sequence, keep.to(zeros.dtype))
    mean = (total / count.clamp(min=1))[sequence]
    return old + mean + (new - new.detach())
