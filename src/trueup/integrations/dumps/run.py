"""Reads the consumed episodes of a run from its episode table, under the run's own rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trueup import config as configuration
from trueup.config import Config
from trueup.corrections.whatif import Replay
from trueup.errors import ConfigError, UsageError
from trueup.integrations.dumps.dump import Dump, Sample, pack
from trueup.records.directory import RunDirectory
from trueup.records.tokens import read_step, steps_written

_COLUMNS = [
    "episode",
    "attempt",
    "group",
    "reward",
    "action",
    "turn",
    "logp_behaviour",
    "logp_target",
    "logp_version",
    "lag_in_flight",
    "lag_in_queue",
    "spans",
]


def read_run(run: RunDirectory, steps: range | None = None) -> Dump:
    """Read what a run consumed; also of a running or killed run.

    Args:
        run: The run.
        steps: Which steps; None for all that are written.

    Raises:
        UsageError: No such step is written, or the configuration cannot be read.
        DataError: A file is damaged.
    """
    written = [step for step in steps_written(run) if steps is None or step in steps]
    if not written:
        raise UsageError(field="--steps", rule="steps that the run has written", value=str(steps))
    return pack(
        (sample for step in written for sample in _samples(run, step)),
        source="run",
        replay=_replay(_config(run)),
    )


def _samples(run: RunDirectory, step: int) -> Iterator[Sample]:
    for row in read_step(run, step, _COLUMNS).to_pylist():
        if row["logp_target"] is None:  # dropped, failed or left over
            continue
        yield _sample(step, row)


def _sample(step: int, row: dict[str, Any]) -> Sample:
    counts = torch.tensor([span["stop"] - span["start"] for span in row["spans"]])
    versions = torch.tensor([span["version"] for span in row["spans"]])
    behaviour = torch.tensor(row["logp_behaviour"], dtype=torch.float32)
    scored = row["logp_version"]
    action = torch.tensor(row["action"], dtype=torch.bool)
    return Sample(
        step=step,
        episode=row["episode"],
        logp_target=torch.tensor(row["logp_target"], dtype=torch.float32),
        logp_behaviour=torch.where(torch.isfinite(behaviour), behaviour, torch.nan),
        logp_version=None if scored is None else torch.tensor(scored, dtype=torch.float32),
        reward=row["reward"],
        group=row["group"],
        version=versions.repeat_interleave(counts),
        lag=torch.tensor(row["lag_in_flight"]) + torch.tensor(row["lag_in_queue"]),
        engine=[
            span["engine"] for span in row["spans"] for _ in range(span["stop"] - span["start"])
        ],
        turn=torch.tensor(row["turn"], dtype=torch.int64)[action],
    )


def _config(run: RunDirectory) -> Config:
    try:
        text = run.config.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{run.config} cannot be read: {error}", field="config.toml", rule="readable"
        ) from None
    return configuration.load(text, source=str(run.config))


def _replay(config: Config) -> Replay:
    return Replay(
        advantage=config.train.advantage,
        zero_variance=config.train.zero_variance,
        denominator=config.correction.denominator,
        max_lag=config.staleness_bound if config.schedule.consume == "mask" else None,
    )
