"""Draws a timeline: slots on top, then what engines decode, the trainer and the weight syncs."""

from __future__ import annotations

from trueup.reports.figure_data import Block, Lane, Timeline
from trueup.reports.markup import Markup, element, join
from trueup.reports.svg import TONES, Box, Scale, document, label, number

HEIGHT = {"decode": 14.0, "train": 20.0, "sync": 14.0}
"""Units per row; a slot's height depends on how many there are."""
LABEL_ROOM = 7.0
"""Units that one character of a block's label needs."""


def draw_timeline(figure: Timeline) -> Markup:
    """The rows from top to bottom with one time axis below."""
    slots = sum(lane["kind"] == "slot" for lane in figure["lanes"])
    tops, bottom = _layout(figure["lanes"], slot_height=min(14.0, max(4.0, 300.0 / max(1, slots))))
    box = Box(width=1120.0, height=bottom + 38.0, left=76.0, right=10.0, top=8.0)
    x0, _, x1, y1 = box.plot
    x = Scale(0.0, max(b["t1"] for b in figure["blocks"]), x0, x1)
    body: list[str] = [_grid(box, x, figure)]
    body += _names(figure["lanes"], tops)
    body += [_block(block, figure["lanes"], tops, x) for block in figure["blocks"]]
    for t0, t1 in figure["bands"]:
        body.append(
            element(
                "rect",
                class_="sync-band",
                x=x(t0),
                y=box.top,
                width=max(1.0, x(t1) - x(t0)),
                height=y1 - box.top,
            )
        )
    return document(box, figure["title"], body, name="chart wide")


def _layout(lanes: list[Lane], slot_height: float) -> tuple[list[tuple[float, float]], float]:
    """(top, height) of every lane and the end of the last one; kinds are set apart."""
    at, tops, before = 8.0, [], ""
    for lane in lanes:
        height = HEIGHT.get(lane["kind"], slot_height)
        at += 8.0 if before and lane["kind"] != before else 0.0
        tops.append((at, height))
        at, before = at + height, lane["kind"]
    return tops, at + 6.0


def _grid(box: Box, x: Scale, figure: Timeline) -> Markup:
    x0, y0, x1, y1 = box.plot
    parts: list[str] = []
    for value in x.ticks(10):
        at = x(value)
        parts.append(element("line", class_="grid", x1=at, x2=at, y1=y0, y2=y1))
        parts.append(label(number(value), at, y1 + 17, anchor="middle"))
    parts.append(element("line", class_="axis", x1=x0, x2=x1, y1=y1, y2=y1))
    parts.append(label(figure["x"]["label"], x1, box.height - 4, anchor="end", name="name"))
    return join(parts)


def _names(lanes: list[Lane], tops: list[tuple[float, float]]) -> list[str]:
    """A name per lane; slots share one, since a run has many."""
    parts: list[str] = []
    slots = [top for lane, top in zip(lanes, tops, strict=True) if lane["kind"] == "slot"]
    if slots:
        middle = (slots[0][0] + slots[-1][0] + slots[-1][1]) / 2
        parts.append(label(f"{len(slots)} slots", 68.0, middle + 4, anchor="end", name="name"))
    for lane, (top, height) in zip(lanes, tops, strict=True):
        if lane["kind"] != "slot":
            at = top + height / 2 + 4
            parts.append(label(lane["name"], 68.0, at, anchor="end", name="name"))
    return parts


def _block(block: Block, lanes: list[Lane], tops: list[tuple[float, float]], x: Scale) -> Markup:
    kind = lanes[block["lane"]]["kind"]
    top, height = tops[block["lane"]]
    gap = 0.5 if kind == "slot" else 0.0
    left, width = x(block["t0"]), max(0.7, x(block["t1"]) - x(block["t0"]) - 0.4)
    shape = element(
        "rect",
        element("title", block["detail"]),
        class_=f"block {kind} tone-{block['tone'] % TONES}",
        x=left,
        y=top + gap,
        width=width,
        height=height - 2 * gap,
        rx=1.5 if height > 6 else None,
    )
    if len(block["label"]) * LABEL_ROOM + 4 > width:
        return shape
    words = label(block["label"], left + width / 2, top + height / 2 + 4, anchor="middle")
    return join([shape, element("g", words, class_="on-block")])
