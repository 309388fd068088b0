"""Reads the episode table: what each step's tokens say about the gap, their lag and their weights.

One file per step is read at a time and only the columns that are needed, so that memory does not
grow with the run. Dropped and failed segments are rows too, but without computed columns.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trueup.errors import DataError
from trueup.records.directory import RunDirectory
from trueup.records.tokens import read_step, steps_written

BIN = 0.05
"""Width of a bin of the weight histogram; bin i is centred on i · BIN, so 0, 1 and a cap are."""
LAST_BIN = 100
"""Weights from about `LAST_BIN * BIN` = 5 on share the last bin."""
GAP_COLUMNS = ["logp_behaviour", "logp_target", "logp_version"]
COLUMNS = [*GAP_COLUMNS, "weight", "keep", "lag_in_flight", "lag_in_queue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """Sums over the consumed action tokens of one step; None where nothing was recorded."""

    step: int
    tokens: int
    attributed: int
    """Those whose log-prob at their own version is known."""
    staleness_part: float | None
    """Mean |log π_old − log π_v| in nats, over the attributed tokens."""
    engine_part: float | None
    """Mean |log π_v − log μ| in nats."""
    lag_in_flight: float | None
    """Mean versions published while the token's episode ran."""
    lag_in_queue: float | None
    """Mean versions published while it waited for the trainer."""
    weights: Counter[int] = field(default_factory=Counter)
    """Bin of the weight in the loss (0 for a rejected token) -> tokens."""


def measure_steps(run_dir: Path) -> tuple[list[StepTokens], list[str]]:
    """One entry per readable step in order, and a sentence per unreadable one."""
    directory = RunDirectory(run_dir)
    found: list[StepTokens] = []
    notes: list[str] = []
    for step in steps_written(directory):
        try:
            table = read_step(directory, step, COLUMNS)
        except DataError as error:
            notes.append(error.message.splitlines()[0])
            continue
        found.append(_measure(step, table))
    if not found and not notes:
        notes.append("No step has an episode table: figures of tokens are empty.")
    return found, notes


def _measure(step: int, table: Any) -> StepTokens:
    scored = table.filter(table["logp_version"].is_valid())
    behaviour, target, version = (_flat(scored, name) for name in GAP_COLUMNS)
    weight = pc.if_else(_flat(table, "keep"), _flat(table, "weight"), 0.0)
    return StepTokens(
        step=step,
        tokens=len(_flat(table, "logp_target")),
        attributed=len(version.filter(pc.is_finite(version))),
        staleness_part=_mean(pc.abs(pc.subtract(target, version))),
        engine_part=_mean(pc.abs(pc.subtract(version, behaviour))),
        lag_in_flight=_mean(_flat(table, "lag_in_flight")),
        lag_in_queue=_mean(_flat(table, "lag_in_queue")),
        weights=_bins(weight),
    )


def _flat(table: Any, column: str) -> Any:
    return pc.list_flatten(table[column])


def _mean(values: Any) -> float | None:
    """Mean of the finite values."""
    values = pc.cast(values, pa.float64())
    mean = pc.mean(values.filter(pc.is_finite(values))).as_py()
    return None if mean is None or math.isnan(mean) else float(mean)


def _bins(weight: Any) -> Counter[int]:
    nearest = pc.floor(pc.add(pc.divide(pc.cast(weight, pa.float64()), BIN), 0.5))
    index = pc.min_element_wise(nearest, LAST_BIN)
    counts = pc.value_counts(index.drop_null())
    return Counter({int(row["values"]): row["counts"] for row in counts.to_pylist()})
