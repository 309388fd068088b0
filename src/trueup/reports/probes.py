"""Loads and probes of every engine: what a load cost, and how far it left the engine off."""

from __future__ import annotations

from collections import Counter
from statistics import median

from trueup.records.schema import Event
from trueup.reports.markup import Markup, element
from trueup.reports.run import Records
from trueup.reports.svg import number
from trueup.reports.tables import table

COLUMNS = (
    *("engine", "loads", "MB", "staged in s", "of it prepared", "paused for s"),
    *("probed", "mean |d|", "floor", "limit", "largest |d|", "cached", "alarms"),
)


def probe_table(records: Records) -> Markup:
    """One row per engine: medians of its loads, its last scored probe, its alarms by name."""
    loads, probes = _by_engine(records, "apply"), _by_engine(records, "probe")
    if not loads:
        return element("p", "nothing was loaded", class_="muted")
    rows = [(name, *_load(loads[name]), *_probe(probes.get(name, []))) for name in sorted(loads)]
    return table(COLUMNS, rows, words={0, 12})


def _by_engine(records: Records, kind: str) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = {}
    for event in records.events(kind):
        found.setdefault(event.engine, []).append(event)
    return found


def _load(loads: list[Event]) -> tuple[str, ...]:
    payloads = [event.payload for event in loads]
    staged = [{"s": p["t_staged"] - p["t_start"]} for p in payloads if "t_staged" in p]
    return (
        str(len(loads)),
        _middle([{"MB": p["nbytes"] / 1e6} for p in payloads if "nbytes" in p], "MB"),
        _middle(staged, "s"),
        _middle(payloads, "prepare_s"),
        _middle(payloads, "pause_s"),
    )


def _middle(payloads: list[dict[str, float]], key: str) -> str:
    values = [payload[key] for payload in payloads if key in payload]
    return number(median(values)) if values else "–"


def _probe(probes: list[Event]) -> tuple[str, ...]:
    scored = [event.payload for event in probes if event.payload["mean"] is not None]
    alarms = Counter(name for event in probes for name, _ in event.payload["alarms"])
    names = ", ".join(f"{name} ({n})" for name, n in alarms.most_common())
    if not scored:
        return (str(len(probes)), *["–"] * 5, names)
    last = scored[-1]
    figures = [last[key] for key in ("mean", "floor", "limit", "max", "cached")]
    return (str(len(probes)), *("–" if f is None else number(f) for f in figures), names)
