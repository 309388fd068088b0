"""Where the time went: overlap of training and decoding, phases, and who waited for whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from trueup.records.schema import Event
from trueup.reports.history import History
from trueup.reports.intervals import Interval, length, merge, overlap, within


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Shares of the time between the first training step's start and the last one's end.

    The trainer's four shares sum to 1. The engines' shares are means over engines.
    """

    trainer_training: float
    trainer_publishing: float
    trainer_evaluating: float
    """Gaps between steps in which an evaluation ended."""
    trainer_waiting: float
    """The rest: no step batch was complete."""
    engine_decoding: float
    engine_loading: float
    """Between receiving a new version and serving it."""
    engine_idle: float
    """No activity at all: every episode waited for its environment, or for admission."""

    @property
    def verdict(self) -> str:
        """Who waits for whom, in words."""
        if max(self.trainer_waiting, self.engine_idle) < 0.05:
            return "nobody waits"
        if self.trainer_waiting >= self.engine_idle:
            return "the trainer waits for episodes"
        return "the engines wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """From the end of one training step to the end of the next, by what filled it; seconds."""

    step: int
    training: float
    publishing: float
    evaluating: float
    waiting: float
    decoding: float
    """Share of the period in which at least one engine decoded."""


def training(events: Sequence[Event]) -> list[Interval]:
    """The trainer's busy time."""
    return [(e.payload["t0"], e.payload["t1"]) for e in events if e.kind == "train"]


def decoding(events: Sequence[Event], engine: str | None = None) -> list[Interval]:
    """Stretches in which engines (or one of them) decoded tokens."""
    return [(t0, t1) for t0, t1, decoded, *_ in _stretches(events, engine) if decoded > 0]


def loading(events: Sequence[Event], engine: str | None = None) -> list[Interval]:
    """From the start of a load of weights until they serve."""
    return [
        (e.payload["t_start"], e.payload["t_end"])
        for e in events
        if e.kind == "apply" and engine in (None, e.engine)
    ]


def overlap_share(history: History) -> float | None:
    """Share of the trainer's busy time in which engines decoded; None without training."""
    busy = sum(length(training(s)) for s in history.sessions)
    both = sum(overlap(training(s), decoding(s)) for s in history.sessions)
    return both / busy if busy else None


def phases(history: History) -> dict[str, tuple[float, float]]:
    """Phase of a training step: (mean seconds, share of the step), closed by an `other`."""
    total: dict[str, float] = defaultdict(float)
    busy, steps = 0.0, 0
    for event in history.events("train"):
        span = event.payload["t1"] - event.payload["t0"]
        parts = event.payload.get("phases", {})
        for name, seconds in parts.items():
            total[name] += seconds
        total["other"] += max(0.0, span - sum(parts.values()))
        busy, steps = busy + span, steps + 1
    return {n: (s / steps, s / busy if busy else 0.0) for n, s in total.items()}


def periods(history: History) -> list[Period]:
    """One entry per training step but the first of each session."""
    found: list[Period] = []
    for session in history.sessions:
        trains = [e for e in session if e.kind == "train"]
        published = merge(
            (e.payload["t0"], e.payload["t1"]) for e in session if e.kind == "publish"
        )
        evaluated = [e.t_mono for e in session if e.kind == "eval"]
        decoded = merge(decoding(session))
        for before, after in pairwise(trains):
            idle = (before.payload["t1"], after.payload["t0"])
            period = (before.payload["t1"], after.payload["t1"])
            publishing = within(published, idle)
            rest = max(0.0, idle[1] - idle[0] - publishing)
            is_eval = any(idle[0] <= t <= idle[1] for t in evaluated)
            found.append(
                Period(
                    step=int(after.payload["step"]),
                    training=after.payload["t1"] - after.payload["t0"],
                    publishing=publishing,
                    evaluating=rest if is_eval else 0.0,
                    waiting=0.0 if is_eval else rest,
                    decoding=within(decoded, period) / max(period[1] - period[0], 1e-9),
                )
            )
    return found


def waits(history: History) -> Waits | None:
    """Who waited for whom; None before the second training step."""
    steps = periods(history)
    total = sum(p.training + p.publishing + p.evaluating + p.waiting for p in steps)
    if not total:
        return None
    engine = _engine_shares(history)
    return Waits(
        trainer_training=sum(p.training for p in steps) / total,
        trainer_publishing=sum(p.publishing for p in steps) / total,
        trainer_evaluating=sum(p.evaluating for p in steps) / total,
        trainer_waiting=sum(p.waiting for p in steps) / total,
        engine_decoding=engine["decoding"],
        engine_loading=engine["loading"],
        engine_idle=engine["idle"],
    )


def _engine_shares(history: History) -> dict[str, float]:
    time: dict[str, float] = defaultdict(float)
    for session in history.sessions:
        busy = training(session)
        engines = {e.engine for e in session if e.kind in ("activity", "apply")}
        for name in engines if busy else ():
            window = [(min(t0 for t0, _ in busy), max(t1 for _, t1 in busy))]
            active = [(t0, t1) for t0, t1, *_ in _stretches(session, name)]
            loads = loading(session, name)
            time["window"] += length(window)
            time["decoding"] += overlap(decoding(session, name), window)
            time["loading"] += overlap(loads, window)
            time["busy"] += overlap([*active, *loads], window)
    window_s = time["window"] or 1.0
    idle = 1.0 - time["busy"] / window_s if time["window"] else 0.0
    shares = {name: time[name] / window_s for name in ("decoding", "loading")}
    return {**shares, "idle": idle}


def _stretches(events: Sequence[Event], engine: str | None) -> list[tuple[float, float, int]]:
    return [
        (float(t0), float(t1), int(decoded))
        for e in events
        if e.kind == "activity" and engine in (None, e.engine)
        for t0, t1, decoded, *_ in e.payload["stretches"]
    ]
