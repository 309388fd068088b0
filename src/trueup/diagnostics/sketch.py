"""Quantiles of any number of values, from shards that merge.

Up to `EXACT` values are held as they are and quantiles are exact. Beyond, a value x is counted in
the bucket of its sign and of ⌈log |x| / log γ⌉, γ = (1 + ε)/(1 − ε), whose middle is within ε·|x|
of every value in it (DDSketch, Masson et al. 2019). A bucket depends on the value alone, so merging
is a sum of counts: shards in any order give the sketch of the whole, bit for bit. Cost is linear,
memory that of the buckets, and no operation is limited to 2^24 elements.

Values are held in float32, which log-probs are; below `SMALLEST` a magnitude counts as 0.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trueup.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

EXACT = 100_000
"""Values up to which nothing is rounded."""
RELATIVE_ERROR = 0.005
"""ε: of a quantile beyond `EXACT` values, relative to the value at its rank."""
SMALLEST = 1e-12

_LOG_GAMMA = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))
_LOWEST = math.ceil(math.log(SMALLEST) / _LOG_GAMMA)
_KEYS = math.ceil(math.log(3.5e38) / _LOG_GAMMA) - _LOWEST + 1
"""Buckets of one sign; key k > 0 is that of exponent k − 1 + `_LOWEST`, −k of the negatives."""
_CHUNK = 1 << 20
"""Elements bucketed at a time: scratch memory does not grow with their number."""
_HEADER = struct.Struct("<BQdd")
_VALUES, _BUCKETS = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantileSketch:
    """Distribution of `count` finite values; make one with `of`, `from_bytes` or `merge`."""

    count: int
    min: float
    """+inf without values."""
    max: float
    """−inf without values."""
    values: NDArray[np.float32] | None
    """[count] ascending; None beyond `EXACT`."""
    buckets: NDArray[np.int64] | None
    """[2·keys + 1] counts in the order of the values; None up to `EXACT`."""

    @classmethod
    def of(cls, values: Tensor) -> QuantileSketch:
        """The sketch of all elements of a tensor, on whatever device it is.

        Raises:
            DataError: A value is not finite in float32.
        """
        import torch

        x = values.detach().reshape(-1).to(torch.float32)
        if not len(x):
            return cls(
                count=0,
                min=math.inf,
                max=-math.inf,
                values=np.zeros(0, np.float32),
                buckets=None,
            )
        low, high = torch.stack(x.aminmax()).tolist()
        if not (math.isfinite(low) and math.isfinite(high)):
            raise DataError(field="values", rule="finite", value=high if low > -math.inf else low)
        exact = len(x) <= EXACT
        return cls(
            count=len(x),
            min=low,
            max=high,
            values=x.sort().values.cpu().numpy() if exact else None,
            buckets=None if exact else _counts(x),
        )

    def merge(self, other: QuantileSketch) -> QuantileSketch:
        """The sketch of both sets of values together."""
        count = self.count + other.count
        held = (self.values, other.values)
        exact = count <= EXACT
        return QuantileSketch(
            count=count,
            min=min(self.min, other.min),
            max=max(self.max, other.max),
            values=np.sort(np.concatenate([v for v in held if v is not None])) if exact else None,
            buckets=None if exact else self._bucketed() + other._bucketed(),
        )

    def quantile(self, share: float) -> float:
        """Value below which `share` of the values lie, linear between ranks; NaN without values."""
        if not self.count:
            return math.nan
        rank = share * (self.count - 1)
        low = math.floor(rank)
        below, above = self._at(low), self._at(min(low + 1, self.count - 1))
        return below + (above - below) * (rank - low)

    def to_bytes(self) -> bytes:
        """Lossless; at most 4 bytes per value or 12 per bucket in use."""
        kind = _BUCKETS if self.values is None else _VALUES
        head = _HEADER.pack(kind, self.count, self.min, self.max)
        if self.buckets is None:
            assert self.values is not None
            return head + self.values.astype("<f4").tobytes()
        used = np.flatnonzero(self.buckets)
        return head + used.astype("<i4").tobytes() + self.buckets[used].astype("<i8").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> QuantileSketch:
        """The inverse of `to_bytes`.

        Raises:
            DataError: These are not the bytes of a sketch.
        """
        try:
            kind, count, low, high = _HEADER.unpack_from(data)
            body = data[_HEADER.size :]
            values = buckets = None
            if kind == _VALUES:
                values = np.frombuffer(body, "<f4").astype(np.float32)
                held = len(values)
            elif kind == _BUCKETS:
                used = len(body) // 12
                buckets = np.zeros(2 * _KEYS + 1, np.int64)
                index = np.frombuffer(body, "<i4", used)
                buckets[index] = np.frombuffer(body, "<i8", used, 4 * used)
                held = int(buckets.sum())
            else:
                raise ValueError(f"kind {kind}")
            if held != count:
                raise ValueError(f"{held} values where {count} are announced")
        except (struct.error, ValueError, IndexError) as error:
            rule = f"the bytes of a sketch ({error})"
            raise DataError(field="sketch", rule=rule, value=f"{len(data)} bytes") from None
        return cls(count=count, min=low, max=high, values=values, buckets=buckets)

    def _bucketed(self) -> NDArray[np.int64]:
        if self.buckets is not None:
            return self.buckets
        import torch

        return _counts(torch.from_numpy(self.values))

    def _at(self, rank: int) -> float:
        """The value at a rank of the ascending values, counted from 0."""
        if self.values is not None:
            return float(self.values[rank])
        if rank in (0, self.count - 1):
            return self.max if rank else self.min
        assert self.buckets is not None
        key = int(np.searchsorted(self.buckets.cumsum(), rank, side="right")) - _KEYS
        if not key:
            return 0.0
        # γ^i · 2/(γ + 1), the middle of (γ^(i−1), γ^i].
        middle = math.exp((abs(key) - 1 + _LOWEST) * _LOG_GAMMA) * (1 - RELATIVE_ERROR)
        return min(max(math.copysign(middle, key), self.min), self.max)


def _counts(x: Tensor) -> NDArray[np.int64]:
    """Counts [2·keys + 1] of a finite float32 tensor."""
    import torch

    counts = torch.zeros(2 * _KEYS + 1, dtype=torch.int64, device=x.device)
    for part in torch.split(x, _CHUNK):
        size = part.abs()
        exponent = (size.double().log() / _LOG_GAMMA).ceil() - (_LOWEST - 1)
        key = torch.where(size < SMALLEST, 0.0, exponent.clamp(1, _KEYS)).copysign(part)
        counts += torch.bincount(key.long() + _KEYS, minlength=len(counts))
    found: NDArray[np.int64] = counts.cpu().numpy()
    return found
