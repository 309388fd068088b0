"""Figures as data: what `figures` makes, `charts` draws and the report embeds as JSON.

Every figure is a dictionary of plain values: it can be stored, compared, and drawn by other tools.
A missing value is None; x and y of a series have equal length.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal, NotRequired, TypedDict

MAX_BARS = 160
"""Bars that a reader can tell apart in one figure."""


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
    """Stacked bars over steps; a long run's bars are means over several steps.

    Args:
        name: Id of the figure.
        title: Its title.
        caption: How to read it.
        y: The vertical axis.
        steps: Steps that have values; any other leaves a hole.
        columns: Name of a series -> its value at each of `steps`.
    """
    first, count = (min(steps), max(steps) - min(steps) + 1) if steps else (0, 1)
    width = math.ceil(count / MAX_BARS)
    bins = math.ceil(count / width)
    held = Counter((step - first) // width for step in steps)
    filled = {key: [0.0] * bins for key in columns}
    for key, values in columns.items():
        for step, value in zip(steps, values, strict=True):
            index = (step - first) // width
            filled[key][index] += value / held[index]
    return {
        "kind": "bars",
        "id": name,
        "title": title,
        "caption": caption,
        "x": {"label": "step", "scale": "linear", "integer": True},
        "y": y,
        "edges": [first + i * width - 0.5 for i in range(bins + 1)],
        "series": [{"name": key, "values": v} for key, v in filled.items() if any(v)],
        "rules": [],
    }
