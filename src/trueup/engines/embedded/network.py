"""What the core asks of a forward pass.

A step of continuous batching is one ragged batch: every row brings the tokens of its sequence that
have no keys and values yet (one while it decodes, many when it joins or after a swap), and gets the
logits behind the last of them. Decoding, prefill and recomputing are therefore one operation.

R: rows of a step, M: new tokens of all rows, P: known tokens of all rows, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from trueup.engines.embedded.parameters import Parameters

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """New tokens of some slots, rows in ascending order of their `kinds`."""

    slots: NDArray[np.int64]
    """[R] distinct cache slots; ascending among rows of one kind."""
    cached: NDArray[np.int64]
    """[R] positions of each slot that are valid in the cache; new tokens come behind them."""
    counts: NDArray[np.int64]
    """[R] new tokens of each row, at least 1."""
    tokens: NDArray[np.int64]
    """[M] new token ids, row after row."""
    known: NDArray[np.int64]
    """[R] how many of a row's last new tokens had been sampled before: recomputing can score them
    again. 0 for a row that is not recomputed."""

    def known_index(self) -> NDArray[np.int64]:
        """[P] packed indices of the tokens that were sampled before, row after row."""
        ends = np.cumsum(self.counts)
        starts = np.repeat(ends - self.known, self.known)
        within = np.arange(len(starts)) - np.repeat(np.cumsum(self.known) - self.known, self.known)
        index: NDArray[np.int64] = starts + within
        return index

    @property
    def singles(self) -> int:
        """How many leading rows have exactly one new token."""
        return int(np.count_nonzero(self.counts == 1))

    def split(self, budget: int) -> Iterator[Batch]:
        """Cut into batches of at most `budget` tokens; a longer row is one of its own."""
        ends = np.cumsum(self.counts)
        begin = 0
        while begin < len(self.slots):
            first = int(ends[begin] - self.counts[begin])
            fits = int(np.searchsorted(ends, first + budget, side="right"))
            end = max(fits, begin + 1)
            yield Batch(
                slots=self.slots[begin:end],
                cached=self.cached[begin:end],
                counts=self.counts[begin:end],
                tokens=self.tokens[first : ends[end - 1]],
                known=self.known[begin:end],
            )
            begin = end


def kinds(cached: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """[R] 0 for a row with one new token, else a class of rows worth padding to one size.

    New tokens and sequence lengths within one class differ by less than a factor of two.
    """
    classes: NDArray[np.int64] = np.where(
        counts == 1, 0, _doublings(counts) * 64 + _doublings(cached + counts)
    )
    return classes


def _doublings(n: NDArray[np.int64]) -> NDArray[np.int64]:
    """Smallest k with 2^k >= n."""
    return np.frexp(n - 1)[1].astype(np.int64)


class Prepared(Protocol):
    """A version in the form that a forward reads."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Every published tensor, from the memory that is read: what is digested."""
        ...


P = TypeVar("P", bound=Prepared)


class Network(Protocol[P]):
    """A causal LM's forward over a cache of slots that it owns."""

    @property
    def fused(self) -> Sequence[Sequence[str]]:
        """Groups of parameters that the forward wants stacked in one storage."""
        ...

    def prepare(self, parameters: Parameters) -> P:
        """Make a version ready: repack, cast, quantise; the served one is not touched."""
        ...

    def bind(self, prepared: P) -> None:
        """Serve this version from the next forward on; the cache stays as it is."""
        ...

    def copy(self, source: int, target: int, length: int) -> int:
        """Give a slot the first positions of another's; returns how many it really got."""
        ...

    def forward(self, batch: Batch) -> Tensor:
        """Compute the new tokens, extend the cache by them, return [R, V] logits in float32."""
        ...

    def states(self) -> Tensor | None:
        """[P, H] what `logits` turns into predictions of the known tokens of the last forward."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """[n, V] float32 behind some of `states`."""
        ...

    def scales(self) -> Tensor | None:
        """[L] activation scales of the last forward, where all its tokens shared them."""
        ...

    def keep(self, slot: int, length: int) -> int:
        """Forget a slot's positions from `length` on; returns how many really stay usable."""
        ...

    def clear(self, slot: int) -> None:
        """Forget a slot, whatever is in it."""
        ...

    def close(self) -> None:
        """Let go of the parameters and of the cache; nothing is computed after this."""
        ...
