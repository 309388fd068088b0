"""Scales, ticks and axes of a small SVG renderer: no library, no script, one file.

Colours are classes (`tone-0` ...) that the report's style sheet defines for light and dark.
Lengths are units of the view box; the page scales it to its column.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from trueup.reports.figure_data import Axis
from trueup.reports.markup import Markup, element, join

TONES = 8
"""Colours in the style sheet; further ones repeat."""


@dataclass(frozen=True, slots=True)
class Box:
    """A view box and the plot area inside it."""

    width: float = 480.0
    height: float = 252.0
    left: float = 50.0
    right: float = 14.0
    top: float = 26.0
    bottom: float = 38.0

    @property
    def plot(self) -> tuple[float, float, float, float]:
        """(x0, y0, x1, y1) of the plot area."""
        return self.left, self.top, self.width - self.right, self.height - self.bottom


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps [low, high] of the data to [start, stop] of the view box, linearly or by logarithm."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False
    integer: bool = False

    def __call__(self, value: float) -> float:
        """Position of a value, held within the plot area."""
        if self.log:
            floor = max(value, self.low)
            share = math.log(floor / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + min(1.0, max(0.0, share)) * (self.stop - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """About `count` round values within the range."""
        if self.log:
            return _log_ticks(self.low, self.high)
        step = nice_step((self.high - self.low) / count)
        step = max(1.0, round(step)) if self.integer else step
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(i * step, 12) for i in range(first, last + 1)]


def nice_step(rough: float) -> float:
    """The smallest of 1, 2, 5 · 10^k that is not below `rough` (> 0)."""
    magnitude = 10.0 ** math.floor(math.log10(rough))
    return next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough * (1 - 1e-9))


def scale_for(axis: Axis, values: Iterable[float], start: float, stop: float) -> Scale:
    """A scale that holds the axis' own limits and every value, rounded outwards to ticks."""
    log, integer = axis["scale"] == "log", axis.get("integer", False)
    found = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    found += [axis[key] for key in ("low", "high") if key in axis]
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    if log:
        low, high = (low, high) if found else (0.1, 1.0)
        low, high = _log_limits(low, high)
        return Scale(low, high, start, stop, log=True)
    if low == high:
        low, high = (low - 1, high + 1) if low else (0.0, 1.0)
    if integer:
        return Scale(low, high, start, stop, integer=True)
    step = nice_step((high - low) / 5)
    low = axis["low"] if axis.get("low") == low else math.floor(low / step + 1e-9) * step
    high = axis["high"] if axis.get("high") == high else math.ceil(high / step - 1e-9) * step
    return Scale(low, high, start, stop)


def axes(box: Box, x: Scale, y: Scale, x_axis: Axis, y_axis: Axis) -> Markup:
    """Grid, tick labels and axis labels; the y label stands level, above its axis."""
    x0, _, x1, y1 = box.plot
    parts: list[str] = []
    for value in y.ticks():
        at = y(value)
        parts.append(element("line", class_="grid", x1=x0, x2=x1, y1=at, y2=at))
        parts.append(label(number(value), x0 - 7, at + 4, anchor="end"))
    for value in x.ticks(7):
        at = x(value)
        parts.append(element("line", class_="tick", x1=at, x2=at, y1=y1, y2=y1 + 4))
        parts.append(label(number(value), at, y1 + 18, anchor="middle"))
    parts.append(element("line", class_="axis", x1=x0, x2=x1, y1=y1, y2=y1))
    parts.append(label(y_axis["label"], 4.0, 13.0, name="name"))
    parts.append(label(x_axis["label"], x1, box.height - 4, anchor="end", name="name"))
    return join(parts)


def label(words: str, x: float, y: float, *, anchor: str = "start", name: str = "") -> Markup:
    """A piece of text; `name` is its class."""
    turned = None if anchor == "start" else anchor
    return element("text", words, x=x, y=y, text_anchor=turned, class_=name or None)


def document(box: Box, title: str, body: Iterable[str], *, name: str = "chart") -> Markup:
    """The whole drawing, labelled for those who cannot see it."""
    return element(
        "svg",
        join(body),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {box.width:g} {box.height:g}",
        role="img",
        aria_label=title,
        class_=name,
    )


def number(value: float) -> str:
    """A short number: `0.25`, `12k`, `3·10⁻⁵`."""
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        exponent = math.floor(math.log10(size) + 1e-9)
        factor = f"{value / 10.0**exponent:.3g}"
        power = "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return power if factor == "1" else f"{factor}·{power}"
    return f"{value / 1000:.3g}k" if size >= 1e4 else f"{value:.4g}"


def _log_limits(low: float, high: float) -> tuple[float, float]:
    """Outwards to 1, 2, 5 · 10^k, at least a factor of ten apart."""
    grid = [m * 10.0**k for k in range(-12, 13) for m in (1, 2, 5)]
    low = max((g for g in grid if g <= low * (1 + 1e-9)), default=grid[0])
    high = min((g for g in grid if g >= max(high, low * 10) * (1 - 1e-9)), default=grid[-1])
    return low, high


def _log_ticks(low: float, high: float) -> list[float]:
    decades = math.log10(high / low)
    factors = (1, 2, 5) if decades <= 2 else (1,)
    stride = max(1, math.ceil(decades / 6))
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    found = [m * 10.0**k for k in range(first, last + 1, stride) for m in factors]
    return [v for v in found if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]


def runs(
    xs: list[float], ys: list[float | None], *, above: float = -math.inf
) -> list[list[tuple[float, float]]]:
    """Cut a series where values are missing, so that no line is drawn across a hole.

    Args:
        xs: Positions.
        ys: Values.
        above: Values that are not greater count as missing (a logarithm has no place for 0).
    """
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(xs, ys, strict=True):
        if y is None or not math.isfinite(y) or y <= above:
            pieces.append([])
        else:
            pieces[-1].append((x, y))
    return [piece for piece in pieces if piece]


def widths(edges: list[float]) -> list[tuple[float, float]]:
    """Bins as (left, right)."""
    return list(pairwise(edges))
