"""Rotary position tables, taken from the model's own module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_TYPES = ("default", "linear", "llama3", "yarn")


def tabulated(config: Any) -> bool:
    """Whether the angles depend on the position alone, so that one table serves all lengths."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        rope.get("rope_type", "default") in _TYPES and rope.get("partial_rotary_factor", 1.0) == 1.0
    )


def tables(
    model: PreTrainedModel, *, rotated: int, plain: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Tables for x·cos + roll(x, D/2)·sin over all heads at once.

    rotate_half(x) = (-x2, x1) and roll(x, D/2) = (x2, x1): the sign moves into the sine.

    Args:
        model: Whose angles, in whose dtype.
        rotated: Query and key heads.
        plain: Value heads behind them, which the tables leave as they are (cos 1, sin 0).
        head_dim: D.

    Returns:
        cos and sin, each [max positions, rotated + plain, D].
    """
    module: Any = model
    positions = torch.arange(module.config.max_position_embeddings)[None]
    with torch.inference_mode():
        cos, sin = module.model.rotary_emb(torch.zeros(1, dtype=model.dtype), positions)
    sign = torch.ones(head_dim, dtype=model.dtype)
    sign[: head_dim // 2] = -1
    found = []
    for table, neutral in ((cos[0], 1.0), (sin[0] * sign, 0.0)):
        whole = table.new_full((len(table), rotated + plain, head_dim), neutral)
        whole[:, :rotated] = table[:, None]
        found.append(whole)
    return found[0], found[1]
