"""Figures as data: what `figures` makes, `charts` draws and the report embeds as JSON.

Every figure is a dictionary of plain values: it can be stored, compared, and drawn by other tools.
A missing value is None; x and y of a series have equal length.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class Axis(TypedDict):
    """One axis; `low` and `high` are limits that the data may only widen."""

    label: str
    scale: Literal["linear", "log"]
    low: NotRequired[float]
    high: NotRequired[float]
    integer: NotRequired[bool]


class Series(TypedDict):
    """Points of one line; `low` and `high` span an interval around each y."""

    name: str
    x: list[float]
    y: list[float | None]
    mark: Literal["line", "dashes", "points"]
    low: NotRequired[list[float | None]]
    high: NotRequired[list[float | None]]


class Rule(TypedDict):
    """A reference value, drawn as a labelled line."""

    value: float
    label: str


class BarSeries(TypedDict):
    """Heights of one series of bars, one per bin; several series are stacked."""

    name: str
    values: list[float]


class Lines(TypedDict):
    """A line chart; rules are horizontal."""

    kind: Literal["lines"]
    id: str
    title: str
    caption: str
    x: Axis
    y: Axis
    series: list[Series]
    rules: list[Rule]


class Bars(TypedDict):
    """A histogram or stacked bars over the bins between `edges`; rules are vertical."""

    kind: Literal["bars"]
    id: str
    title: str
    caption: str
    x: Axis
    y: Axis
    edges: list[float]
    series: list[BarSeries]
    rules: list[Rule]


class Block(TypedDict):
    """One bar of a timeline; times in seconds from the start of the window."""

    lane: int
    t0: float
    t1: float
    tone: int
    label: str
    detail: str


class Lane(TypedDict):
    """One row of a timeline."""

    name: str
    kind: Literal["slot", "decode", "train", "sync"]


class Tone(TypedDict):
    """A colour of the legend."""

    tone: int
    name: str


class Timeline(TypedDict):
    """Rows over time; `bands` are moments that cross all rows."""

    kind: Literal["timeline"]
    id: str
    title: str
    caption: str
    x: Axis
    lanes: list[Lane]
    blocks: list[Block]
    bands: list[tuple[float, float]]
    legend: list[Tone]


Figure = Lines | Bars | Timeline


def line(
    name: str, x: list[float], y: list[float | None], *, mark: Literal["line", "dashes"] = "line"
) -> Series:
    """A series without an interval."""
    return {"name": name, "x": x, "y": y, "mark": mark}


def lines(
    name: str,
    title: str,
    caption: str,
    y: Axis,
    series: list[Series],
    rules: list[Rule] | None = None,
) -> Lines:
    """A line chart over steps."""
    return {
        "kind": "lines",
        "id": name,
        "title": title,
        "caption": caption,
        "x": {"label": "step", "scale": "linear", "integer": True},
        "y": y,
        "series": series,
        "rules": rules or [],
    }


def stacked(
    name: str,
    title: str,
    caption: str,
    y: Axis,
    steps: list[int],
    columns: dict[str, list[float]],
) -> Bars:
    """One stacked bar per step; a step that is missing leaves a hole."""
    first, last = (min(steps), max(steps)) if steps else (0, 0)
    at = {step: i for i, step in enumerate(steps)}
    filled = {
        key: [values[at[s]] if s in at else 0.0 for s in range(first, last + 1)]
        for key, values in columns.items()
    }
    return {
        "kind": "bars",
        "id": name,
        "title": title,
        "caption": caption,
        "x": {"label": "step", "scale": "linear", "integer": True},
        "y": y,
        "edges": [s - 0.5 for s in range(first, last + 2)],
        "series": [{"name": key, "values": v} for key, v in filled.items() if any(v)],
        "rules": [],
    }
