"""Sampling with one uniform per row, and the log-prob of what was really sampled from.

Inverse CDF: the token whose interval of cumulative probability holds u. A large vocabulary is
searched in two levels (block, then token within it), which needs one exponential per logit and no
random number per token. The log-prob is that of the distribution after temperature and truncation.

Noise is counter-based: position i of a completion uses the i-th uniform of a stream that only the
request's key decides (SHAKE128 of the key), so tokens depend on no neighbour in the batch.

R: rows, V: vocabulary.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK = 256
_ONE_LEVEL = 1024
"""Largest vocabulary that is searched in one level."""


def uniforms(key: tuple[int, ...], n: int) -> NDArray[np.float64]:
    """The first n numbers, in [0, 1), of the stream that belongs to a key.

    Args:
        key: Any integers of 64 bits; equal keys give equal streams, on every machine.
        n: How many; a longer draw starts with a shorter one.
    """
    packed = struct.pack(f"<{len(key)}q", *key)
    bits = np.frombuffer(hashlib.shake_128(packed).digest(8 * n), dtype="<u8")
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: Tensor,
    u: Tensor,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample one token per row.

    Args:
        logits: [R, V] float32; -inf means impossible.
        u: [R] float64 in [0, 1).
        temperature: [R] > 0; None: 1 for all.
        top_k: [R] most tokens kept; 0: all. None with `top_p`: no row is truncated.
        top_p: [R] the smallest set of most probable tokens with at least this share of what top_k
            kept; 1: all.
        forced: [R] tokens to take instead; -1: sample this row.

    Returns:
        [R] tokens (int64) and [R] log-probs (float64, exact to 1e-6 for the given logits); -inf for
        a forced token outside a truncated support. A row whose logits are not finite has NaN.
    """
    if temperature is not None:
        logits = logits / temperature.float()[:, None]
    centred = logits - logits.amax(-1, keepdim=True)
    given = None if forced is None else centred.gather(1, forced.clamp_min(0)[:, None])[:, 0]
    masses = centred.exp_()  # in place: a large vocabulary's memory is what sampling costs
    if top_k is not None and top_p is not None:
        masses = _truncated(masses, top_k, top_p)
    tokens, total = _search(masses, u)
    if forced is None or given is None:
        return tokens, _log(masses, tokens) - total.log()
    tokens = torch.where(forced >= 0, forced, tokens)
    chosen = torch.where(forced >= 0, given.double(), _log(masses, tokens))
    if top_k is not None:
        kept = masses.gather(1, tokens[:, None])[:, 0] > 0
        chosen.masked_fill_(~kept, -torch.inf)
    return tokens, chosen - total.log()


def kept_mass(
    logits: Tensor, tokens: Tensor, logps: Tensor, temperature: Tensor | None = None
) -> Tensor:
    """[R] share of the probability on the set that truncated sampling drew from.

    NaN for a forced token outside it.

    Args:
        logits: As `sample` had them.
        tokens: [R] what it sampled.
        logps: [R] log-probs that it returned, on the kept set.
        temperature: As `sample` had it.
    """
    if temperature is not None:
        logits = logits / temperature.float()[:, None]
    whole = logits.gather(1, tokens[:, None])[:, 0].double() - logits.double().logsumexp(-1)
    return torch.where(logps.isfinite(), (whole - logps).exp(), torch.nan)


def _log(masses: Tensor, tokens: Tensor) -> Tensor:
    """[R] log of the mass of one token of each row, in float64."""
    return masses.gather(1, tokens[:, None])[:, 0].double().log()


def _search(masses: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """[R] index at which the cumulative mass passes u·total, and [R] the total in float64."""
    size = masses.shape[1]
    if size <= _ONE_LEVEL:
        sums = masses.cumsum(-1, dtype=torch.float64)
        total = sums[:, -1]
        return _passes(sums, u * total), total
    blocks = -(-size // _BLOCK)
    padded = masses
    if size % _BLOCK:
        padded = torch.nn.functional.pad(masses, (0, blocks * _BLOCK - size))
    padded = padded.view(-1, blocks, _BLOCK)
    sums = padded.sum(-1).cumsum(-1, dtype=torch.float64)
    total = sums[:, -1]
    target = u * total
    block = _passes(sums, target)
    row = torch.arange(len(u), device=masses.device)
    before = torch.where(block > 0, sums[row, (block - 1).clamp_min(0)], 0.0)
    inner = padded[row, block].cumsum(-1, dtype=torch.float64)
    found = block * _BLOCK + _passes(inner, target - before)
    return found.clamp_max_(size - 1), total  # only a row of NaN ends in the padding


def _passes(sums: Tensor, target: Tensor) -> Tensor:
    """[R] first index whose cumulative sum exceeds the target: never one of mass zero.

    The target is kept below the last sum, which rounding could otherwise let it reach. A row of
    NaN gets some index within range.
    """
    below = torch.nextafter(sums[:, -1], torch.zeros_like(target))
    bounded = torch.minimum(target, below)[:, None]
    return torch.searchsorted(sums, bounded, right=True)[:, 0].clamp_max_(sums.shape[1] - 1)


def _truncated(masses: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Masses with everything outside the kept sets at zero; ties are broken by token id."""
    rows = torch.nonzero((top_k > 0) | (top_p < 1))[:, 0]
    if not len(rows):
        return masses
    size = masses.shape[1]
    ordered, order = masses[rows].sort(dim=-1, descending=True, stable=True)
    k, p = top_k[rows], top_p[rows].double()
    rank = torch.arange(size, device=masses.device)
    within_k = rank < torch.where(k > 0, k, size)[:, None]
    sums = torch.where(within_k, ordered, 0.0).cumsum(-1, dtype=torch.float64)
    mass_before = sums - ordered
    kept = within_k & ((mass_before < p[:, None] * sums[:, -1:]) | (rank == 0))
    kept_by_token = torch.zeros_like(kept).scatter_(1, order, kept)
    return masses.index_copy(0, rows, torch.where(kept_by_token, masses[rows], 0.0))
