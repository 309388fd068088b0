"""From a row of named columns to a sample: one reader for all formats with a row per episode.

A format is a choice of names. Padding is told from tokens by the masks alone, never by a value:
0 is a log-prob, and several frameworks pad with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trueup.errors import DataError
from trueup.integrations.dumps.dump import Sample

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Names of a format; where several are given, the first that a row has counts."""

    name: str
    target: tuple[str, ...]
    behaviour: tuple[str, ...]
    masks: tuple[str, ...] = ()
    """All that a row has must be true for an action token."""
    padded: bool = True
    """Rows may be padded, so that one of the masks must be there."""
    reward: tuple[str, ...] = ()
    """A number, or one per token, which are summed."""
    advantage: tuple[str, ...] = ()
    """A number, or one per token, of which the mean over action tokens counts."""
    group: tuple[str, ...] = ()
    signature: frozenset[str] = frozenset()
    """Columns by which a dump without log-probs is known."""
    notes: tuple[str, ...] = ()
    """What is peculiar to the format."""

    def fits(self, names: frozenset[str]) -> bool:
        """Whether a row with these columns is of this format."""
        return not names.isdisjoint(self.behaviour) or (
            bool(self.signature) and self.signature <= names
        )


COMMON = ("step", "version", "trainer_version", "engine", "logp_version")
"""Columns that every format may have: `version` and `engine` once or per token, `trainer_version`
once, `logp_version` per token."""


def sample(row: Row, columns: Columns, *, episode: str, step: int) -> Sample:
    """Read a row.

    Args:
        row: By column.
        columns: Its format.
        episode: Name of the episode, for messages.
        step: Step batch, if the row has no `step`.

    Raises:
        DataError: Log-probs or a needed mask are missing, lengths differ, or a value is of the
            wrong kind. Episode and column are named.
    """
    reader = _Reader(row=row, episode=episode)
    behaviour = reader.tokens(columns.behaviour, "what sampled a token cannot be known without it")
    target = reader.tokens(columns.target, "there is no gap without it")
    keep = reader.mask(columns, len(behaviour))
    reader.same_length(columns.target, target, len(behaviour))
    version = reader.whole("version", len(behaviour))
    trainer = reader.whole("trainer_version", len(behaviour))
    lag = None if version is None or trainer is None else (trainer - version)[keep]
    if lag is not None and len(lag) and int(lag.min()) < 0:
        raise DataError(
            field=f"episode {episode}, trainer_version", rule=">= version", value=int(lag.min())
        )
    logp_version = reader.optional("logp_version")
    if logp_version is not None:
        reader.same_length(("logp_version",), logp_version, len(behaviour))
    return Sample(
        step=reader.step(step),
        episode=episode,
        logp_target=target[keep],
        logp_behaviour=torch.where(torch.isfinite(behaviour), behaviour, torch.nan)[keep],
        logp_version=None if logp_version is None else logp_version[keep],
        reward=reader.number(columns.reward, keep, mean=False),
        advantage=reader.number(columns.advantage, keep, mean=True),
        group=reader.group(columns.group),
        version=None if version is None else version[keep],
        lag=lag,
        engine=reader.engines(keep),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Typed access to one row."""

    row: Row
    episode: str

    def tokens(self, names: tuple[str, ...], why: str) -> Tensor:
        """[T] float32."""
        name = self._first(names)
        if name is None:
            raise DataError(
                field=f"episode {self.episode}, {' or '.join(names)}",
                rule=f"present, as {why}",
                value=None,
            )
        return self._floats(name)

    def step(self, default: int) -> int:
        value = self.row.get("step")
        if value is None:
            return default
        return int(self._as_tensor("step", value, torch.int64).reshape(-1)[0])

    def optional(self, name: str) -> Tensor | None:
        return None if self.row.get(name) is None else self._floats(name)

    def mask(self, columns: Columns, length: int) -> Tensor:
        """[T] bool: an action token."""
        present = [name for name in columns.masks if self.row.get(name) is not None]
        if columns.padded and not present:
            raise DataError(
                field=f"episode {self.episode}, {' or '.join(columns.masks)}",
                rule="present, as padding cannot be told from tokens without it",
                value=None,
            )
        keep = torch.ones(length, dtype=torch.bool)
        for name in present:
            flags = self._floats(name)
            self.same_length((name,), flags, length)
            keep &= flags > 0
        return keep

    def same_length(self, names: tuple[str, ...], values: Tensor, length: int) -> None:
        if len(values) != length:
            raise DataError(
                field=f"episode {self.episode}, {self._first(names)}",
                rule=f"of the length of the behaviour log-probs, {length}",
                value=len(values),
            )

    def whole(self, name: str, length: int) -> Tensor | None:
        """[T] int64 from one number or one per token."""
        value = self.row.get(name)
        if value is None:
            return None
        found = self._as_tensor(name, value, torch.int64)
        if found.dim() == 0:
            return found.expand(length)
        self.same_length((name,), found, length)
        return found

    def number(self, names: tuple[str, ...], keep: Tensor, *, mean: bool) -> float | None:
        name = self._first(names)
        if name is None:
            return None
        value = self._as_tensor(name, self.row[name], torch.float64)
        if value.dim():
            self.same_length((name,), value, len(keep))
            value = value[keep]
            value = value.sum() / max(len(value), 1) if mean else value.sum()
        if not bool(torch.isfinite(value)):
            raise DataError(
                field=f"episode {self.episode}, {name}", rule="finite", value=float(value)
            )
        return float(value)

    def group(self, names: tuple[str, ...]) -> str | None:
        name = self._first(names)
        return None if name is None else json.dumps(self.row[name], sort_keys=True, default=str)

    def engines(self, keep: Tensor) -> list[str] | None:
        value = self.row.get("engine")
        if value is None:
            return None
        if isinstance(value, str):
            return [value] * int(keep.sum())
        if len(value) != len(keep):
            raise DataError(
                field=f"episode {self.episode}, engine",
                rule=f"of the length of the behaviour log-probs, {len(keep)}",
                value=len(value),
            )
        return [str(name) for name, kept in zip(value, keep.tolist(), strict=True) if kept]

    def _first(self, names: tuple[str, ...]) -> str | None:
        return next((name for name in names if self.row.get(name) is not None), None)

    def _floats(self, name: str) -> Tensor:
        value = self.row[name]
        if isinstance(value, list):
            value = [float("nan") if x is None else x for x in value]
        found = self._as_tensor(name, value, torch.float32)
        if found.dim() != 1:
            raise DataError(
                field=f"episode {self.episode}, {name}",
                rule="one number per token",
                value=tuple(found.shape),
            )
        return found

    def _as_tensor(self, name: str, value: Any, dtype: torch.dtype) -> Tensor:
        try:
            return torch.as_tensor(value, dtype=dtype)
        except (TypeError, ValueError, RuntimeError):
            raise DataError(
                field=f"episode {self.episode}, {name}", rule="numbers", value=value
            ) from None
