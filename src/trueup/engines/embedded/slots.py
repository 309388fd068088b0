"""What the decode loop keeps per slot, as arrays: no Python object per token.

A slot's ids are everything its sequence consists of, prompt and samples alike; `cached` of them
have valid keys and values, `filled` of them are known. What lies between is what the next forward
computes: one token while a sequence decodes, the new part of a prompt when it joins, everything
after a swap of the weights.

S: slots, L: most tokens of a turn, K: most stop ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trueup.engines.embedded.network import Batch, kinds
from trueup.engines.embedded.sampling import uniforms
from trueup.types import Replay, SamplingParams

if TYPE_CHECKING:
    from numpy.typing import NDArray


class SlotTable:
    """Arrays over slots; columns grow by doubling.

    Args:
        slots: S.
    """

    def __init__(self, slots: int) -> None:
        """All slots idle and empty."""
        self.running = np.zeros(slots, dtype=np.bool_)
        """[S] whether a turn is being sampled."""
        self.cached = np.zeros(slots, dtype=np.int64)
        self.filled = np.zeros(slots, dtype=np.int64)
        self.start = np.zeros(slots, dtype=np.int64)
        """[S] length of the prompt: where the turn's first sampled token lies."""
        self.temperature = np.ones(slots, dtype=np.float32)
        self.top_p = np.ones(slots, dtype=np.float64)
        self.top_k = np.zeros(slots, dtype=np.int64)
        self._limit = np.zeros(slots, dtype=np.int64)
        self._ids = np.zeros((slots, 64), dtype=np.int64)
        self._noise = np.zeros((slots, 8), dtype=np.float64)
        self._logps = np.zeros((slots, 8), dtype=np.float32)
        self._stops = np.full((slots, 1), -1, dtype=np.int64)
        self._kept_mass = np.ones((slots, 8), dtype=np.float32)
        self._scales = np.zeros((slots, 0, 0), dtype=np.float32)
        """[S, L, linears] activation scales of the forward that sampled a token; no linears: none
        are recorded."""
        self._forced = np.full((slots, 8), -1, dtype=np.int64)
        self.forcing = np.zeros(slots, dtype=np.bool_)
        """[S] whether the turn's tokens are given instead of sampled."""

    def common_prefix(self, slot: int, prompt: NDArray[np.int32]) -> int:
        """Leading prompt ids that are cached; the last one never counts: its logits are needed."""
        most = min(int(self.cached[slot]), len(prompt) - 1)
        differs = self._ids[slot, :most] != prompt[:most]
        return int(differs.argmax()) if differs.any() else most

    def begin(
        self,
        slot: int,
        prompt: NDArray[np.int32],
        sampling: SamplingParams,
        forced: Sequence[int] | None = None,
        *,
        cached: int,
    ) -> None:
        """Start a turn behind a prompt of which the first `cached` ids are valid in the cache."""
        n, limit = len(prompt), sampling.max_tokens
        self._ids = _widened(self._ids, n + limit)
        self._noise = _widened(self._noise, limit)
        self._logps = _widened(self._logps, limit)
        self._kept_mass = _widened(self._kept_mass, limit)
        self._kept_mass[slot, :limit] = 1
        self._stops = _widened(self._stops, len(sampling.stop_ids), fill=-1)
        self._ids[slot, :n] = prompt
        self._noise[slot, :limit] = uniforms(sampling.key, limit)
        self._stops[slot] = -1
        self.forcing[slot] = forced is not None
        if forced is not None:
            self._forced = _widened(self._forced, limit)
            self._forced[slot, :limit] = forced
        else:
            self._stops[slot, : len(sampling.stop_ids)] = sampling.stop_ids
        self.cached[slot], self.filled[slot], self.start[slot] = cached, n, n
        self._limit[slot] = limit
        self.temperature[slot] = sampling.temperature
        self.top_p[slot], self.top_k[slot] = sampling.top_p, sampling.top_k
        self.running[slot] = True

    def batch(self) -> Batch:
        """What the next forward computes: the tokens of running slots without keys and values."""
        slots = np.flatnonzero(self.running)
        counts = (self.filled - self.cached)[slots]
        if counts.max() > 1:
            order = np.argsort(kinds(self.cached[slots], counts), kind="stable")
            slots, counts = slots[order], counts[order]
            rows = np.repeat(slots, counts)
            firsts = np.cumsum(counts) - counts
            at = np.arange(len(rows)) + np.repeat(self.cached[slots] - firsts, counts)
            tokens = self._ids[rows, at]
        else:
            tokens = self._ids[slots, self.cached[slots]]
        known = np.minimum(self.filled - self.start, self.filled - self.cached - 1)[slots]
        return Batch(
            slots=slots, cached=self.cached[slots], counts=counts, tokens=tokens, known=known
        )

    def noise(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """[R] uniform for the next token of each slot."""
        found: NDArray[np.float64] = self._noise[slots, (self.filled - self.start)[slots]]
        return found

    def forced(self, slots: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """[R] next token of each slot, -1 where it is sampled; None if none is given."""
        forcing = self.forcing[slots]
        if not forcing.any():
            return None
        at = np.minimum((self.filled - self.start)[slots], self._forced.shape[1] - 1)
        found: NDArray[np.int64] = np.where(forcing, self._forced[slots, at], -1)
        return found

    def note_kept_mass(self, slots: NDArray[np.int64], mass: NDArray[np.float64]) -> None:
        """[R] share that truncated sampling kept for the next token of each slot."""
        self._kept_mass[slots, (self.filled - self.start)[slots]] = mass

    def note_scales(self, slots: NDArray[np.int64], scales: NDArray[np.float32]) -> None:
        """[R, linears] activation scales behind the next token of each slot."""
        rows, linears = len(self.running), scales.shape[1]
        columns = self._logps.shape[1]
        if self._scales.shape[1] < columns:
            wider = np.zeros((rows, columns, linears), dtype=np.float32)
            if self._scales.size:
                wider[:, : self._scales.shape[1]] = self._scales
            self._scales = wider
        self._scales[slots, (self.filled - self.start)[slots]] = scales

    def replay(self, slot: int) -> Replay | None:
        """What a trainer can repeat of the turn so far."""
        count = self.sampled(slot)
        truncated = self.top_p[slot] < 1 or self.top_k[slot] > 0
        if not count or not (truncated or self._scales.size):
            return None
        return Replay(
            kept_mass=_floats(self._kept_mass[slot, :count]) if truncated else None,
            scales=_floats(self._scales[slot, :count]) if self._scales.size else None,
        )

    def append(
        self, slots: NDArray[np.int64], tokens: NDArray[np.int64], logps: NDArray[np.float64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Take one sampled token per slot; what the forward computed is cached from now on.

        Returns:
            [R] the token is a stop id; [R] the turn has its most tokens.
        """
        at = self.filled[slots]
        self.cached[slots] = at
        self._ids[slots, at] = tokens
        self._logps[slots, at - self.start[slots]] = logps
        self.filled[slots] = at + 1
        stopped = (self._stops[slots] == tokens[:, None]).any(1)
        return stopped, at + 1 - self.start[slots] >= self._limit[slots]

    def sampled(self, slot: int) -> int:
        """Tokens of the turn so far."""
        return int(self.filled[slot] - self.start[slot])

    def end(self, slot: int) -> tuple[array[int], array[float]]:
        """Stop running; returns the turn's ids and log-probs."""
        self.running[slot] = False
        start, stop = self.start[slot], self.filled[slot]
        ids = array("i")
        ids.frombytes(self._ids[slot, start:stop].astype(np.int32).tobytes())
        return ids, _floats(self._logps[slot, : stop - start])

    def forget(self, slot: int) -> None:
        """Make a slot empty and idle."""
        self.running[slot] = False
        self.cached[slot] = self.filled[slot] = self.start[slot] = 0


def _floats(values: NDArray[np.float32]) -> array[float]:
    found = array("f")
    found.frombytes(values.tobytes())
    return found


def _widened(table: NDArray[Any], columns: int, fill: float = 0) -> NDArray[Any]:
    """The table with at least so many columns."""
    rows, held = table.shape
    if columns <= held:
        return table
    wider = np.full((rows, max(columns, 2 * held)), fill, dtype=table.dtype)
    wider[:, :held] = table
    return wider
