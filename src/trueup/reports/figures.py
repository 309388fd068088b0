"""The figures of a report as data; drawing is `charts`' business.

Each function answers one question of a reader and returns a dictionary that can be stored as JSON.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

from trueup.reports import timing
from trueup.reports.figure_data import Bars, Figure, Lines, Rule, Series, line, lines, stacked
from trueup.reports.history import Step
from trueup.reports.run import Records
from trueup.reports.summary import Summary, evaluations_of
from trueup.reports.timeline import timeline
from trueup.reports.tokens import BIN, LAST_BIN, StepTokens


def figures_of(records: Records, summary: Summary, tokens: Sequence[StepTokens]) -> list[Figure]:
    """All figures of a run, in the order in which a reader needs them."""
    return [
        reward(records),
        gap(records, tokens),
        timeline(records.history),
        effective_sizes(records),
        weights(tokens),
        staleness(records, summary),
        lag_parts(tokens),
        trainer_time(records),
        throughput(records),
    ]


def reward(records: Records) -> Lines:
    """Does the agent learn, and does it carry over to tasks it never saw?"""
    steps = records.history.steps
    means = [_reward(step) for step in steps]
    evaluations = evaluations_of(records.history)
    passed = [(e.payload.get("passed"), e.payload.get("episodes")) for e in evaluations]
    intervals = [wilson(p, n) if p is not None and n else (None, None) for p, n in passed]
    train: Series = {
        "name": "training reward",
        "x": [float(s.step) for s in steps],
        "y": [mean for mean, _ in means],
        "low": [None if m is None else max(0.0, m - (e or 0.0)) for m, e in means],
        "high": [None if m is None else m + (e or 0.0) for m, e in means],
        "mark": "line",
    }
    heldout: Series = {
        "name": "held-out pass rate",
        "x": [float(e.payload["step"]) for e in evaluations],
        "y": [e.payload.get("heldout_pass_rate") for e in evaluations],
        "low": [low for low, _ in intervals],
        "high": [high for _, high in intervals],
        "mark": "points",
    }
    return lines(
        "reward",
        "Reward",
        "Mean reward of the groups that arrived for each step (band: ± 1 standard error over "
        "groups, those without contrast included) and held-out pass rate with its 95 % interval.",
        {"label": "reward", "scale": "linear", "low": 0.0, "high": 1.0},
        [train, heldout],
    )


def gap(records: Records, tokens: Sequence[StepTokens]) -> Lines:
    """How far is behaviour from target, and which part is staleness, which the engine?"""
    parts = [t for t in tokens if t.staleness_part is not None]
    base = floor(tokens)
    rules: list[Rule] = [{"value": base, "label": "floor"}] if base else []
    steps = [float(t.step) for t in parts]
    series = [
        _series(records, "gap/abs_log_ratio", "whole gap"),
        line("staleness part", steps, [t.staleness_part for t in parts], mark="dashes"),
        line("engine part", steps, [t.engine_part for t in parts]),
    ]
    return lines(
        "gap",
        "Gap between behaviour and target",
        "Mean |log-prob difference| per token. The staleness part compares two versions in the "
        "trainer's numerics; the engine part is what is left at the token's own version: flat on "
        "its floor (mean over the run) unless a sync went wrong. Absolute means do not add up.",
        {"label": "nats per token", "scale": "log"},
        [s for s in series if any(v is not None for v in s["y"])],
        rules,
    )


def floor(tokens: Sequence[StepTokens]) -> float | None:
    """The engine's own mismatch in nats, over all attributed tokens of the run."""
    parts = [(t.attributed, t.engine_part) for t in tokens if t.engine_part is not None]
    total = sum(n for n, _ in parts)
    return sum(n * part for n, part in parts) / total if total else None


def effective_sizes(records: Records) -> Lines:
    """How much of the batch still counts once it is weighted?"""
    series = [
        _series(records, "ess/raw_tokens", "raw ratios"),
        applied_sizes(records),
    ]
    return lines(
        "ess",
        "Effective sample size",
        "ESS ratio over tokens, 1 = every token counts alike. The distance between the lines is "
        "variance that the correction removed; below 0.3 a few tokens speak for the batch.",
        {"label": "ESS / n", "scale": "linear", "low": 0.0, "high": 1.0},
        [s for s in series if s["x"]],
        [{"value": 0.3, "label": "alarm 0.3"}],
    )


def applied_sizes(records: Records) -> Series:
    """ESS ratio of the weights in the loss; missing where a step had no contrast, hence no loss."""
    trained = {float(step.step) for step in records.history.steps if step.trained}
    x, y = records.series("ess/applied_tokens")
    shown = [value if step in trained else None for step, value in zip(x, y, strict=True)]
    return line("applied weights", x, shown)


def weights(tokens: Sequence[StepTokens]) -> Bars:
    """Which weights did the correction give, and how many tokens did it cap or reject?"""
    counts: Counter[int] = Counter()
    for step in tokens:
        counts += step.weights
    last = max([*counts, round(2 / BIN)])
    values = [float(counts[i]) for i in range(last + 1)]
    overflow = " The last bin holds all larger ones." if last == LAST_BIN else ""
    return {
        "kind": "bars",
        "id": "weights",
        "title": "Weights in the loss",
        "caption": "Trained tokens by the weight of their gradient: 1 is no correction, a spike at "
        "the right end is the cap, one at 0 are tokens outside the loss: rejected, or of a group "
        "without contrast." + overflow,
        "x": {"label": "weight", "scale": "linear"},
        "y": {"label": "tokens", "scale": "log", "low": 1.0},
        "edges": [(i - 0.5) * BIN for i in range(last + 2)],
        "series": [{"name": "tokens", "values": values}],
        "rules": [{"value": 1.0, "label": "no correction"}],
    }


def staleness(records: Records, summary: Summary) -> Bars:
    """How old were the tokens that were trained, and did the bound hold?"""
    lag_tokens = summary.lag_tokens
    bound = None if records.config is None else records.config.staleness_bound
    last = max([*lag_tokens, 0 if bound is None else bound + 1])
    rules: list[Rule] = [] if bound is None else [{"value": bound + 0.5, "label": f"bound {bound}"}]
    return {
        "kind": "bars",
        "id": "staleness",
        "title": "Staleness",
        "caption": "Consumed tokens by lag: the trainer's version when their step starts minus the "
        "version that sampled them. Nothing may lie right of the bound unless the policy "
        "of consumption accepts it.",
        "x": {"label": "lag in versions", "scale": "linear", "integer": True},
        "y": {"label": "tokens", "scale": "linear", "low": 0.0},
        "edges": [i - 0.5 for i in range(last + 2)],
        "series": [
            {"name": "tokens", "values": [float(lag_tokens.get(i, 0)) for i in range(last + 1)]}
        ],
        "rules": rules,
    }


def lag_parts(tokens: Sequence[StepTokens]) -> Bars:
    """Do tokens grow old while their episode runs, or while it waits for the trainer?"""
    return stacked(
        "lag-parts",
        "Where lag comes from",
        "Mean lag of a trained token per step, split: versions published while its episode ran "
        "(swaps in flight), and while the finished episode waited (queue).",
        {"label": "versions", "scale": "linear", "low": 0.0},
        [t.step for t in tokens],
        {
            "in flight": [t.lag_in_flight or 0.0 for t in tokens],
            "in queue": [t.lag_in_queue or 0.0 for t in tokens],
        },
    )


def trainer_time(records: Records) -> Bars:
    """What does the trainer do all day?"""
    steps = timing.periods(records.history)
    return stacked(
        "trainer-time",
        "The trainer's time",
        "Seconds from the end of one step to the end of the next. Waiting means that no step batch "
        "was complete: more slots, faster tools or a larger bound would help.",
        {"label": "seconds", "scale": "linear", "low": 0.0},
        [p.step for p in steps],
        {
            "training": [p.training for p in steps],
            "waiting for episodes": [p.waiting for p in steps],
            "publishing": [p.publishing for p in steps],
            "evaluating": [p.evaluating for p in steps],
        },
    )


def throughput(records: Records) -> Lines:
    """How fast does it go, step by step?"""
    steps: list[float] = []
    rates: list[float | None] = []
    by_session: dict[int, list[Step]] = defaultdict(list)
    for step in records.history.steps:
        by_session[step.session].append(step)
    for session in by_session.values():
        for before, after in pairwise(session):
            seconds = after.t_end - before.t_end
            steps.append(float(after.step))
            rates.append(len(after.trained) / seconds if seconds > 0 else None)
    return lines(
        "throughput",
        "Throughput",
        "Trained episodes per second from one step's end to the next's. Dips are steps that "
        "waited for their longest episodes, or an evaluation in between.",
        {"label": "episodes per second", "scale": "linear", "low": 0.0},
        [line("episodes per second", steps, rates)],
    )


def wilson(passed: int, episodes: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a pass rate. Example: `wilson(5, 10)` is about (0.24, 0.76)."""
    p, n = passed / episodes, float(episodes)
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def _reward(step: Step) -> tuple[float | None, float | None]:
    """Mean reward of the episodes that arrived, and its standard error over groups."""
    groups: dict[int, list[float]] = defaultdict(list)
    for attempt in step.arrived:
        if attempt.reward is not None:
            groups[attempt.group].append(attempt.reward)
    rewards = [r for group in groups.values() for r in group]
    if not rewards:
        return None, None
    means = [sum(g) / len(g) for g in groups.values()]
    middle, n = sum(means) / len(means), len(means)
    variance = sum((m - middle) ** 2 for m in means) / (n - 1) if n > 1 else 0.0
    return sum(rewards) / len(rewards), math.sqrt(variance / n)


def _series(records: Records, metric: str, name: str) -> Series:
    x, y = records.series(metric)
    return line(name, x, y)
