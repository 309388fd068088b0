"""The scales that a forward's inputs asked for: recorded by an engine, repeated by a trainer.

With one scale for all tokens of a forward, a token's log-prob depends on what it was batched with,
and no trainer can know that; one float per layer and forward is what it would have to know.

The layout of a record is that of `types.Replay.scales`: one column per linear layer of the blocks,
in the order of the model's modules (query, key, value, output, gate, up, down of every block).

L: linear layers, M: tokens of a forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Recorder:
    """Keeps the last scale of every layer.

    Args:
        modules: Names of the L linear layers, in the order of the record.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        """Nothing is recorded yet."""
        self._columns = {name: column for column, name in enumerate(modules)}
        self._scales: list[Tensor | None] = [None] * len(modules)

    def tap(self, modules: Sequence[str], rows: Sequence[int]) -> RecordingTap:
        """The tap of a layer in which some modules are stacked.

        Args:
            modules: Their names.
            rows: Output rows of each.
        """
        ends = torch.tensor(rows).cumsum(0).tolist()
        spans = [
            (self._columns[name], end - size, end)
            for name, size, end in zip(modules, rows, ends, strict=True)
        ]
        return RecordingTap(self._scales, spans)

    def take(self) -> Tensor:
        """[L] float32: the scales of the forward that has just run; the next one starts empty."""
        used = [scale for scale in self._scales if scale is not None]
        assert len(used) == len(self._scales), "every layer has run since the last record"
        self._scales[:] = [None] * len(used)
        return torch.stack(used).cpu()


class RecordingTap:
    """Notes the scale for the modules whose rows it covers; see `inputs.Tap`.

    Args:
        scales: Where to note it, by column.
        spans: Column, first and end row of each module.
    """

    def __init__(self, scales: list[Tensor | None], spans: Sequence[tuple[int, int, int]]) -> None:
        """Share the record."""
        self._scales = scales
        self._spans = spans

    def __call__(self, scales: Tensor) -> Tensor:
        """See `inputs.Tap`; the scale is kept as it is, so that nothing waits for a device."""
        for column, _, _ in self._spans:
            self._scales[column] = scales
        return scales

    def part(self, first: int, end: int) -> RecordingTap:
        """See `inputs.Tap.part`; rows are counted from its own first."""
        return RecordingTap(
            self._scales,
            [
                (column, begin - first, stop - first)
                for column, begin, stop in self._spans
                if first <= begin and stop <= end
            ],
        )


class Repetition:
    """Recorded scales of the tokens that are computed next; those that are not finite are not used.

    Set `scales` before every forward.
    """

    def __init__(self) -> None:
        """No token has a recorded scale."""
        self.scales: Tensor | None = None
        """[M, L] one row per token, in the order of the forward's tokens; None: none recorded."""

    def tap(self, column: int) -> RepeatingTap:
        """The tap of one layer."""
        return RepeatingTap(self, column)


class RepeatingTap:
    """Gives every token its recorded scale; see `inputs.Tap`."""

    def __init__(self, repetition: Repetition, column: int) -> None:
        """Share the record."""
        self._repetition = repetition
        self._column = column

    def __call__(self, scales: Tensor) -> Tensor:
        """See `inputs.Tap`: [M, 1]."""
        recorded = self._repetition.scales
        if recorded is None:
            return scales
        given = recorded[:, self._column, None]
        return torch.where(given.isfinite(), given, scales)

    def part(self, first: int, end: int) -> RepeatingTap:
        """See `inputs.Tap.part`; all rows have the same inputs."""
        return self
