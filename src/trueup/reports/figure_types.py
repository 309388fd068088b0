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
