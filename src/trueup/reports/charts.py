"""Draws a figure's data: lines with intervals, stacked bars and histograms, timelines."""

from __future__ import annotations

import math
from typing import NamedTuple

from trueup.reports.figure_data import Bars, Figure, Lines, Rule, Series
from trueup.reports.gantt import draw_timeline
from trueup.reports.markup import Markup, element, join
from trueup.reports.svg import (
    TONES,
    Box,
    Scale,
    axes,
    document,
    label,
    number,
    runs,
    scale_for,
    widths,
)

MAX_HITS = 160
"""Points of a line that tell their value when pointed at; a longer line tells some."""


class LegendItem(NamedTuple):
    """What a colour stands for; `mark` is the shape of the sample."""

    tone: int
    mark: str
    name: str


def draw(figure: Figure) -> Markup:
    """The figure as an SVG element; one without data says so."""
    if not has_data(figure):
        box = Box(height=120.0)
        note = label("nothing recorded", box.width / 2, 64.0, anchor="middle", name="empty")
        return document(box, figure["title"], [note])
    if figure["kind"] == "lines":
        return _draw_lines(figure)
    if figure["kind"] == "bars":
        return _draw_bars(figure)
    return draw_timeline(figure)


def has_data(figure: Figure) -> bool:
    """Whether there is anything to draw."""
    if figure["kind"] == "timeline":
        return bool(figure["blocks"])
    if figure["kind"] == "bars":
        return any(any(series["values"]) for series in figure["series"])
    return any(value is not None for series in figure["series"] for value in series["y"])


def legend(figure: Figure) -> list[LegendItem]:
    """Names of the colours; empty where one series needs no name."""
    if figure["kind"] == "timeline":
        return [LegendItem(t["tone"], "block", t["name"]) for t in figure["legend"]]
    if figure["kind"] == "bars":
        items = [LegendItem(i, "block", s["name"]) for i, s in enumerate(figure["series"])]
    else:
        items = [LegendItem(i, s["mark"], s["name"]) for i, s in enumerate(figure["series"])]
    return items if len(items) > 1 else []


def _draw_lines(figure: Lines) -> Markup:
    box = Box()
    x0, y0, x1, y1 = box.plot
    xs = [x for series in figure["series"] for x in series["x"]]
    x = scale_for(figure["x"], xs, x0, x1)
    y = scale_for(figure["y"], [*_heights(figure), *(r["value"] for r in figure["rules"])], y1, y0)
    body: list[str] = [axes(box, x, y, figure["x"], figure["y"])]
    body += [_rule(rule, y(rule["value"]), x0, x1) for rule in figure["rules"]]
    for tone, series in enumerate(figure["series"]):
        body.append(element("g", *_series(series, x, y), class_=f"tone-{tone % TONES}"))
    return document(box, figure["title"], body)


def _heights(figure: Lines) -> list[float]:
    columns = (s.get(key, []) for s in figure["series"] for key in ("y", "low", "high"))
    return [v for column in columns for v in column if v is not None]  # type: ignore[attr-defined]


def _series(series: Series, x: Scale, y: Scale) -> list[str]:
    if series["mark"] == "points":
        return _points(series, x, y)
    parts: list[str] = []
    low, high = series.get("low"), series.get("high")
    if low is not None and high is not None:
        pairs = zip(runs(series["x"], low), runs(series["x"], high), strict=True)
        parts += [_band(under, over, x, y) for under, over in pairs]
    for piece in runs(series["x"], series["y"], above=0.0 if y.log else -math.inf):
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in piece)
        parts.append(element("polyline", class_=series["mark"], points=path))
        for a, b in piece[:: math.ceil(len(piece) / MAX_HITS)]:
            words = f"{series['name']}: {number(b)} at {number(a)}"
            radius = 2.5 if len(piece) == 1 else 5.0
            name = "dot" if len(piece) == 1 else "hit"
            parts.append(element("circle", _title(words), class_=name, cx=x(a), cy=y(b), r=radius))
    return parts


def _band(
    under: list[tuple[float, float]], over: list[tuple[float, float]], x: Scale, y: Scale
) -> Markup:
    outline = [*over, *reversed(under)]
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in outline)
    return element("path", class_="band", d=f"M{path}Z")


def _points(series: Series, x: Scale, y: Scale) -> list[str]:
    parts: list[str] = []
    empty: list[float | None] = [None] * len(series["x"])
    rows = zip(
        series["x"],
        series["y"],
        series.get("low", empty),
        series.get("high", empty),
        strict=True,
    )
    for a, b, low, high in rows:
        if b is None:
            continue
        words = f"{series['name']}: {number(b)} at {number(a)}"
        if low is not None and high is not None:
            at = x(a)
            parts.append(element("line", class_="whisker", x1=at, x2=at, y1=y(low), y2=y(high)))
            words += f" ({number(low)} to {number(high)})"
        parts.append(element("circle", _title(words), class_="dot", cx=x(a), cy=y(b), r=4.5))
    return parts


def _draw_bars(figure: Bars) -> Markup:
    box = Box()
    x0, y0, x1, y1 = box.plot
    bins = widths(figure["edges"])
    totals = [sum(s["values"][i] for s in figure["series"]) for i in range(len(bins))]
    x = Scale(bins[0][0], bins[-1][1], x0, x1, integer=figure["x"].get("integer", False))
    y = scale_for(figure["y"], totals, y1, y0)
    body: list[str] = [axes(box, x, y, figure["x"], figure["y"])]
    gap = min(2.0, (x1 - x0) / max(1, len(bins)) * 0.12)
    base = [0.0] * len(bins)
    for tone, series in enumerate(figure["series"]):
        rects: list[str] = []
        for i, (left, right) in enumerate(bins):
            value = series["values"][i]
            if value <= 0:
                continue
            top, foot = y(base[i] + value), y(base[i]) if base[i] or not y.log else y1
            base[i] += value
            rects.append(
                element(
                    "rect",
                    _title(f"{series['name']}: {number(value)} in {_bin(figure, left, right)}"),
                    class_="bar",
                    x=x(left) + gap / 2,
                    y=top,
                    width=max(0.5, x(right) - x(left) - gap),
                    height=max(0.0, foot - top),
                )
            )
        body.append(element("g", *rects, class_=f"tone-{tone % TONES}"))
    for rule in figure["rules"]:
        at = x(rule["value"])
        end = at > (x0 + x1) / 2
        body.append(element("line", class_="rule", x1=at, x2=at, y1=y0, y2=y1))
        side = {"anchor": "end"} if end else {}
        body.append(label(rule["label"], at + (4 if end else -4), y0 - 7, name="note", **side))
    return document(box, figure["title"], body)


def _bin(figure: Bars, left: float, right: float) -> str:
    name = figure["x"]["label"]
    if figure["x"].get("integer"):
        return f"{name} {number((left + right) / 2)}"
    return f"{name} {number(left)} to {number(right)}"


def _rule(rule: Rule, at: float, x0: float, x1: float) -> Markup:
    line = element("line", class_="rule", x1=x0, x2=x1, y1=at, y2=at)
    return join([line, label(rule["label"], x1 - 2, at - 5, anchor="end", name="note")])


def _title(words: str) -> Markup:
    return element("title", words)
