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


def tables(model: PreTrainedModel, *, heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Tables for x·cos + roll(x, D/2)·sin over all rotated heads at once.

    rotate_half(x) = (-x2, x1) and roll(x, D/2) = (x2, x1): the sign moves into the sine.

    Args:
        model: Whose angles, in whose dtype.
        heads: Query and key heads.
        head_dim: D.

    Returns:
        cos and sin, each [max positions, heads, D].
    """
    module: Any = model
    positions = torch.arange(module.config.max_position_embeddings)[None]
    with torch.inference_mode():
        cos, sin = module.model.rotary_emb(torch.zeros(1, dtype=model.dtype), positions)
    sign = torch.ones(head_dim, dtype=model.dtype)
    sign[: head_dim // 2] = -1
    wide, signed = (table[:, None].repeat(1, heads, 1) for table in (cos[0], sin[0] * sign))
    return wide, signed
