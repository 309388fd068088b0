"""A window of a run as a timeline.

Which slot ran which attempt under which version, and what engines, trainer and weight syncs did
meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from trueup.records.schema import Event
from trueup.reports.figure_data import Block, Lane, Timeline, Tone
from trueup.reports.history import Attempt, History, Step
from trueup.reports.intervals import Interval, merge
from trueup.reports.svg import TONES
from trueup.reports.timing import decoding

WINDOW_STEPS = 5
MAX_ATTEMPTS = 400
"""Attempts drawn; a window with more is shortened."""
TRAIN_TONE, DECODE_TONE, SYNC_TONE = 0, 1, 2


def timeline(history: History) -> Timeline:
    """The middle `WINDOW_STEPS` steps of the run's longest session."""
    steps = _window(history.steps)
    lanes: list[Lane] = []
    blocks: list[Block] = []
    bands: list[tuple[float, float]] = []
    legend: list[Tone] = []
    if steps:
        session = history.sessions[steps[0].session]
        start, stop = steps[0].train["t0"], steps[-1].train["t1"]
        attempts = [
            a
            for a in history.attempts
            if a.session == steps[0].session
            and _inside((a.t_issue, _end(a, session)), (start, stop))
        ]
        if len(attempts) > MAX_ATTEMPTS:
            attempts = attempts[:MAX_ATTEMPTS]
            stop = max(steps[0].train["t1"], attempts[-1].t_issue)
        window = (start, stop)
        _attempt_rows(attempts, session, window, lanes, blocks)
        _engine_rows(session, window, lanes, blocks, bands)
        _trainer_row(session, window, lanes, blocks)
        versions = sorted({_version(a) for a in attempts})
        legend = [{"tone": v % TONES, "name": f"version {v}"} for v in versions[-TONES:]]
    span = f" Steps {steps[0].step} to {steps[-1].step} are shown." if steps else ""
    return {
        "kind": "timeline",
        "id": "timeline",
        "title": "Timeline",
        "caption": "One row per slot, one bar per attempt, coloured by the version that sampled "
        "its first token; vertical lines are weight syncs: a bar that crosses k of them spans "
        "k + 1 versions. Below: when engines decode, sync, and the trainer trains." + span,
        "x": {"label": "seconds", "scale": "linear", "low": 0.0},
        "lanes": lanes,
        "blocks": blocks,
        "bands": bands,
        "legend": legend,
    }


def _window(steps: Sequence[Step]) -> list[Step]:
    sessions = [s.session for s in steps]
    longest = max(sorted(set(sessions)), key=sessions.count, default=0)
    inside = [s for s in steps if s.session == longest]
    first = max(0, (len(inside) - WINDOW_STEPS) // 2)
    return inside[first : first + WINDOW_STEPS]


def _attempt_rows(
    attempts: Sequence[Attempt],
    session: Sequence[Event],
    window: Interval,
    lanes: list[Lane],
    blocks: list[Block],
) -> None:
    slots = sorted({(a.engine, a.slot) for a in attempts})
    row = {slot: len(lanes) + i for i, slot in enumerate(slots)}
    lanes += [{"name": f"{engine} slot {slot}", "kind": "slot"} for engine, slot in slots]
    for a in attempts:
        ended = "running" if a.finish is None else str(a.finish.get("status", ""))
        reward = "" if a.reward is None else f", reward {a.reward:g}"
        seen = sorted({v for v, _, _, _ in a.spans})
        versions = (
            f"versions {seen[0]} to {seen[-1]}" if len(seen) > 1 else f"version {_version(a)}"
        )
        blocks.append(
            _block(
                row[a.engine, a.slot],
                (a.t_issue, _end(a, session)),
                window,
                tone=_version(a),
                detail=f"{a.task} (group {a.group}.{a.member}): {versions}, {ended}{reward}",
            )
        )


def _engine_rows(
    session: Sequence[Event],
    window: Interval,
    lanes: list[Lane],
    blocks: list[Block],
    bands: list[tuple[float, float]],
) -> None:
    engines = sorted({e.engine for e in session if e.kind in ("activity", "apply")})
    decode_row, sync_row = len(lanes), len(lanes) + len(engines)
    for kind in ("decode", "sync"):
        alone = len(engines) == 1
        lanes += [
            {"name": kind if alone else f"{kind} {i}", "kind": kind} for i in range(len(engines))
        ]
    resolution = (window[1] - window[0]) / 800
    for i, engine in enumerate(engines):
        for busy in merge(decoding(session, engine), gap=resolution):
            if _inside(busy, window):
                detail = f"{engine} decodes for {busy[1] - busy[0]:.2f} s"
                blocks.append(_block(decode_row + i, busy, window, DECODE_TONE, detail))
        for event in session:
            if event.kind != "apply" or event.engine != engine:
                continue
            load = (event.payload["t_start"], event.payload["t_end"])
            if _inside(load, window):
                detail = f"{engine} loads version {event.version}"
                blocks.append(
                    _block(sync_row + i, load, window, event.version, detail, f"v{event.version}")
                )
                bands.append((max(0.0, load[0] - window[0]), min(load[1], window[1]) - window[0]))


def _trainer_row(
    session: Sequence[Event], window: Interval, lanes: list[Lane], blocks: list[Block]
) -> None:
    row = len(lanes)
    lanes.append({"name": "trainer", "kind": "train"})
    for event in session:
        if event.kind != "train":
            continue
        busy = (event.payload["t0"], event.payload["t1"])
        if _inside(busy, window):
            step = event.payload["step"]
            detail = f"step {step}: {busy[1] - busy[0]:.2f} s"
            blocks.append(_block(row, busy, window, TRAIN_TONE, detail, f"step {step}"))


def _block(
    lane: int, time: Interval, window: Interval, tone: int, detail: str, label: str = ""
) -> Block:
    start, stop = window
    return {
        "lane": lane,
        "t0": round(max(time[0], start) - start, 4),
        "t1": round(min(time[1], stop) - start, 4),
        "tone": tone % TONES,
        "label": label,
        "detail": detail,
    }


def _inside(time: Interval, window: Interval) -> bool:
    return time[0] < window[1] and time[1] > window[0]


def _end(attempt: Attempt, session: Sequence[Event]) -> float:
    """When the attempt left its slot; the last sign of life of the run if it never did."""
    if attempt.finish is not None and attempt.finish.get("t_end"):
        return float(attempt.finish["t_end"])
    return session[-1].t_mono if attempt.t_finish is None else attempt.t_finish


def _version(attempt: Attempt) -> int:
    """The version that sampled the first token; the trainer's at the start if there is none yet."""
    return attempt.spans[0][0] if attempt.spans else attempt.version
