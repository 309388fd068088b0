"""A 64-bit digest of tensors that adds up: Σ bits(x_i) · h(name, i) mod 2^64.

It is a sum, so shards, machines and orders do not matter, and it is computed where the tensors are,
an engine's memory included. h is odd, so a change of one element always changes the digest; any
other change goes unseen with a chance near 2^-64. It guards against faults, not against forgers.

`bits` reads an element as a signed integer of its own size. Elements wider than 32 bits are read as
32-bit lanes, because a flip of bit 63 in two elements would otherwise cancel (2^63 · even = 0).

h(name, i) = A(name, i // K) · T(i mod K) with mixed odd factors: within a row of K lanes the digest
is then one integer dot product with a constant table, which reads the tensor once.
K: lanes of a row, R: rows of a chunk, n: lanes of a tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch

from trueup.errors import TransportFault

_K = 1 << 14
# The widened copy of a chunk: 512 KiB stay in a core's cache; elsewhere few launches matter more.
_ROWS_PER_CHUNK_CPU = 4
_ROWS_PER_CHUNK_ELSEWHERE = 1024
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_LANE_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def lanes(tensor: torch.Tensor) -> torch.Tensor:
    """The raw bits of a tensor as a flat view of integers of at most 32 bits, [n].

    Args:
        tensor: Dense, of any dtype and shape; copied only where it is not contiguous.

    Raises:
        TransportFault: The tensor has no memory of its own layout to read (sparse, meta).
    """
    if tensor.layout != torch.strided or tensor.is_meta:
        raise TransportFault(
            field="tensor", rule="dense and materialised", value=f"{tensor.layout} {tensor.device}"
        )
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(_LANE_DTYPES[min(tensor.element_size(), 4)])


def tensor_digest(name: str, tensor: torch.Tensor, offset: int = 0) -> int:
    """Digest of one tensor, or of a shard of it.

    Args:
        name: Name of the whole tensor.
        tensor: The tensor, or a run of its elements in row-major order.
        offset: Index of the shard's first element in the whole tensor.

    Returns:
        An integer in [0, 2^64); those of all shards add up, mod 2^64, to that of the whole.

    Raises:
        TransportFault: The tensor is sparse or has no storage.
    """
    bits = lanes(tensor)
    lanes_per_element = max(tensor.element_size() // 4, 1)
    row, column = divmod(offset * lanes_per_element, _K)
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    table = _column_factors(str(bits.device))

    total = 0
    if column:
        head, bits = bits[: _K - column], bits[_K - column :]
        dots = _row_dots(head[None], table[column : column + head.numel()])
        total += _weighted(dots, seed, row)
        row += 1
    whole = bits.numel() // _K
    rows = bits[: whole * _K].view(whole, _K)
    step = _ROWS_PER_CHUNK_CPU if bits.device.type == "cpu" else _ROWS_PER_CHUNK_ELSEWHERE
    for start in range(0, whole, step):
        dots = _row_dots(rows[start : start + step], table)
        total += _weighted(dots, seed, row + start)
    tail = bits[whole * _K :]
    if tail.numel():
        dots = _row_dots(tail[None], table[: tail.numel()])
        total += _weighted(dots, seed, row + whole)
    return total & _MASK


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Digest of a set of named tensors: the sum of theirs, as 16 hex digits."""
    return merge(tensor_digest(name, tensor) for name, tensor in tensors.items())


def merge(parts: Iterable[int]) -> str:
    """Add digests of shards or tensors, mod 2^64, as 16 hex digits."""
    return f"{sum(parts) & _MASK:016x}"


def _row_dots(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """[R, K] · [K] -> [R] in wrapping 64-bit integers."""
    return rows.to(torch.int64).mul_(factors).sum(1)


def _weighted(dots: torch.Tensor, seed: int, first_row: int) -> int:
    """Σ A(name, row) · dot over the rows of a chunk; few, so in exact Python integers."""
    values: list[int] = dots.tolist()
    return sum(dot * (_mix(seed + (first_row + i) * _GOLDEN) | 1) for i, dot in enumerate(values))


@lru_cache(maxsize=8)
def _column_factors(device: str) -> torch.Tensor:
    """T: [K] odd 64-bit factors, the same on every machine."""
    factors = [_signed(_mix((j + 1) * _GOLDEN) | 1) for j in range(_K)]
    return torch.tensor(factors, dtype=torch.int64, device=device)


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele et al. 2014): every input bit moves every output bit."""
    x &= _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The 64-bit pattern of x as the integer that int64 arithmetic knows it by."""
    return x - (1 << 64) if x >> 63 else x
