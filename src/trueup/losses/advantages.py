"""Group-relative advantages: an episode against the others of its task.

Shapes: E episodes in groups; ids may be any integers. Everything is a scatter over group ids, so
the cost does not depend on how groups are laid out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from trueup.gap import distinct

AdvantageKind = Literal["group", "group_std", "leave_one_out"]
"""r − mean; (r − mean) / std; r − mean of the others."""


@dataclass(frozen=True, kw_only=True)
class GroupAdvantages:
    """Advantages of a step batch."""

    value: Tensor
    """[E] float32; 0 for members left out and for groups without contrast."""
    contrast: Tensor
    """[E] bool: the rewards of the counted members of its group are not all equal."""
    num_with_contrast: Tensor
    """[] int64 groups with contrast."""
    num_without_contrast: Tensor
    """[] int64 groups with counted members but without contrast; a group of one is such."""


def group_advantages(
    reward: Tensor, group: Tensor, *, counted: Tensor, kind: AdvantageKind
) -> GroupAdvantages:
    """Advantage of each counted episode within its group.

    The standard deviation is the sample one (ddof 1), as GRPO implementations take it. No ε is
    added: without contrast the advantage is 0 by definition, and with it |r − mean| / std is at
    most (n − 1)/√n.

    Args:
        reward: [E] float32, finite.
        group: [E] int64.
        counted: [E] bool: members that the baseline knows of; the others get 0.
        kind: Which baseline and scale.
    """
    ids, index = distinct(group)
    r = torch.where(counted, reward.detach().double(), 0.0)
    zeros = r.new_zeros(len(ids))
    members = counted.double()
    size = zeros.index_add(0, index, members)
    mean = zeros.index_add(0, index, r) / size.clamp(min=1)
    low = torch.full_like(zeros, torch.inf).scatter_reduce(0, index[counted], r[counted], "amin")
    high = torch.full_like(zeros, -torch.inf).scatter_reduce(0, index[counted], r[counted], "amax")
    has_contrast = high > low
    contrast = has_contrast[index]
    centred = torch.where(counted & contrast, r - mean[index], 0.0)
    if kind == "group_std":
        squares = zeros.index_add(0, index, centred.square())
        scale = (squares / (size - 1).clamp(min=1)).sqrt()
        value = centred / torch.where(has_contrast, scale, 1.0)[index]
    elif kind == "leave_one_out":
        # r − (Σ − r)/(n − 1) = (r − mean) · n/(n − 1)
        value = centred * (size / (size - 1).clamp(min=1))[index]
    else:
        value = centred
    return GroupAdvantages(
        value=value.float(),
        contrast=contrast,
        num_with_contrast=has_contrast.sum(),
        num_without_contrast=((size > 0) & ~has_contrast).sum(),
    )


def without_rejected(value: Tensor, group: Tensor, *, counted: Tensor) -> GroupAdvantages:
    """Group-relative advantages made elsewhere, less the part of members that are rejected now.

    Within a group such an advantage is the reward, shifted and scaled. Centred anew over the
    counted members it is what it would have been had the others never been in the baseline (the
    scale stays). A group that lost nobody is unchanged, bit for bit, and so has contrast.

    Args:
        value: [E] float32 advantages, finite.
        group: [E] int64.
        counted: [E] bool: members that are not rejected.
    """
    rest = group_advantages(value, group, counted=counted, kind="group")
    ids, index = distinct(group)
    none = torch.zeros_like(ids)
    lost = none.index_add(0, index, (~counted).long())[index] > 0
    contrast = rest.contrast | ~lost
    left = none.index_add(0, index, counted.long()) > 0
    teaches = left & (none.index_add(0, index, contrast.long()) > 0)
    return replace(
        rest,
        value=torch.where(lost, rest.value, value.detach()),
        contrast=contrast,
        num_with_contrast=teaches.sum(),
        num_without_contrast=(left & ~teaches).sum(),
    )
