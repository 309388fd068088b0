"""Figures as one SVG file that needs no page around it: panels with title, legend and caption."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from importlib import resources

from trueup.reports.charts import LegendItem, draw, legend
from trueup.reports.figure_data import Figure
from trueup.reports.markup import Markup, element, join
from trueup.reports.svg import TONES, Box, label

_BOX = Box()
_GAP, _TITLE, _LEGEND, _LINE = 24.0, 22.0, 18.0, 15.0
_LETTER = 6.6
"""About the width of a letter, for wrapping."""


def standalone(figures: Sequence[Figure], *, title: str, columns: int = 2) -> str:
    """The figures side by side as one SVG document.

    Args:
        figures: Lines and bars.
        title: What the drawing is called, for those who cannot see it.
        columns: Panels in a row.
    """
    width, panels = _BOX.width + _GAP, [_panel(figure) for figure in figures]
    rows = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    placed: list[Markup] = []
    top = _GAP
    for row in rows:
        for column, (body, _) in enumerate(row):
            at = f"translate({_GAP + column * width:g} {top:g})"
            placed.append(element("g", body, transform=at))
        top += max(height for _, height in row) + _GAP
    style = resources.files("trueup.reports").joinpath("report.css").read_text(encoding="utf-8")
    paper = element("rect", class_="paper", width="100%", height="100%")
    return element(
        "svg",
        element("style", Markup(f"{style}\n{_STYLE}")),
        paper,
        *placed,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {columns * width + _GAP:g} {top:g}",
        role="img",
        aria_label=title,
    )


_STYLE = """.paper { fill: var(--page); }
svg { overflow: visible; }
svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
"""


def _panel(figure: Figure) -> tuple[Markup, float]:
    """A figure with its words, and its height."""
    parts = [element("text", figure["title"], x=4.0, y=14.0, class_="name", font_weight="650")]
    top = _TITLE
    for line in _lines(legend(figure)):
        parts.append(_legend(line, top))
        top += _LEGEND
    size = {"x": "0", "y": f"{top:g}", "width": f"{_BOX.width:g}", "height": f"{_BOX.height:g}"}
    parts.append(element("svg", draw(figure), **size))
    top += _BOX.height + _LINE
    for words in textwrap.wrap(figure["caption"], int(_BOX.width / _LETTER)):
        parts.append(label(words, 4.0, top))
        top += _LINE
    return join(parts), top


def _lines(items: Sequence[LegendItem]) -> list[list[tuple[float, LegendItem]]]:
    """Legend items with their positions, wrapped to the panel's width."""
    lines: list[list[tuple[float, LegendItem]]] = []
    x = _BOX.width
    for item in items:
        width = 34.0 + _LETTER * len(item.name)
        if x + width > _BOX.width:
            lines.append([])
            x = 4.0
        lines[-1].append((x, item))
        x += width
    return lines


def _legend(items: Sequence[tuple[float, LegendItem]], top: float) -> Markup:
    parts: list[Markup] = []
    for x, item in items:
        y = top + 8
        if item.mark == "points":
            sample = element("circle", class_="dot", cx=x + 7, cy=y, r=4.5)
        elif item.mark == "block":
            sample = element("rect", class_="bar", x=x, y=y - 5, width=14.0, height=10.0)
        else:
            path = f"{x:.1f},{y:.1f} {x + 14:.1f},{y:.1f}"
            sample = element("polyline", class_=item.mark, points=path)
        parts.append(element("g", sample, class_=f"tone-{item.tone % TONES}"))
        parts.append(label(item.name, x + 19, y + 4))
    return join(parts)
