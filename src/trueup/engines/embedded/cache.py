"""Keys and values of all slots, contiguous, grown in buckets.

One tensor per layer, [2, S, H, T, D]: keys and values, S slots, H key-value heads, T positions, D
head dimension. Contiguity lets one index_copy write the new keys and values of a whole batch, and
lets batched matrix products read slots 0 ... n-1 up to any position without a copy. Memory is
zeroed when it is allocated or forgotten after a fault: attention multiplies masked positions by
zero, and zero times a NaN left behind would be NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BUCKET = 32


class SlotCache:
    """The key-value store of the slim forward.

    Args:
        layers: Number of layers.
        slots: S.
        heads: H.
        head_dim: D.
        dtype: Of keys and values.
        device: Where they lie.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the first bucket."""
        self._shape = (2, slots, heads, _BUCKET, head_dim)
        self.layers = [torch.zeros(self._shape, dtype=dtype, device=device) for _ in range(layers)]
        kinds, head = np.divmod(np.arange(2 * heads), heads)
        self._rows_of_heads = kinds * slots * heads + head
        self._heads = heads

    @property
    def slots(self) -> int:
        """S."""
        return self.layers[0].shape[1]

    @property
    def positions(self) -> int:
        """T: positions allocated per slot."""
        return self.layers[0].shape[3]

    @torch.inference_mode()
    def reserve(self, positions: int) -> None:
        """Make room for at least so many positions per slot, keeping what is there."""
        held = self.positions
        if positions <= held:
            return
        grown = -(-max(positions, held * 9 // 8) // _BUCKET) * _BUCKET
        for index, old in enumerate(self.layers):
            new = old.new_zeros((*old.shape[:3], grown, old.shape[4]))
            new[:, :, :, :held] = old
            self.layers[index] = new

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Zero a slot."""
        for layer in self.layers:
            layer[:, slot] = 0

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Give a slot the first positions of another's."""
        for layer in self.layers:
            layer[:, target, :, :length] = layer[:, source, :, :length]

    def rows(self, slots: NDArray[np.int64], at: NDArray[np.int64]) -> NDArray[np.int64]:
        """[M, 2H] -> [M·2H]: where the keys, then values, of M tokens lie among the D-rows.

        Args:
            slots: [M] slot of each token.
            at: [M] its position.
        """
        per_head = self.positions
        starts = slots * (self._heads * per_head) + at
        index: NDArray[np.int64] = starts[:, None] + self._rows_of_heads * per_head
        return index.reshape(-1)

    def read(self, layer: int, slots: Tensor, attended: int) -> tuple[Tensor, Tensor]:
        """Copies of some slots' keys and values, each [R, H, attended, D].

        Whole slots are copied, because a contiguous copy of all positions is faster than a strided
        one of some.

        Args:
            layer: Which layer.
            slots: [2R] the slots, then the slots + S.
            attended: Positions wanted.
        """
        store = self.layers[layer]
        both = store.view(2 * store.shape[1], -1).index_select(0, slots)
        keys, values = both.view(2, -1, *store.shape[2:])[:, :, :, :attended]
        return keys, values

    def write(self, layer: int, rows: Tensor, keys_values: Tensor) -> None:
        """Store [M·2H, D] keys and values at the places that `rows` named."""
        store = self.layers[layer]
        store.view(-1, store.shape[-1]).index_copy_(0, rows, keys_values)
