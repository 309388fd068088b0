"""The result of a run in a few figures, from its directory alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from trueup.records.schema import Event
from trueup.reports import timing
from trueup.reports.gain import Gain, paired_gain
from trueup.reports.history import History, lags
from trueup.reports.run import Records, read_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run did; None where its records do not say."""

    run: str
    steps: int
    """Step batches consumed and not rolled back, those without contrast included."""
    base_pass_rate: float | None
    """Held-out pass rate before the first step."""
    heldout_pass_rate: float | None
    """Held-out pass rate of the last evaluation after it."""
    gain: Gain | None
    """What lies between the two, over the tasks that both evaluated."""
    base_reads_per_episode: float | None
    reads_per_episode: float | None
    """Files read per held-out episode, first and last evaluation."""
    episodes_launched: int
    """Training attempts issued, further attempts included."""
    episodes_trained: int
    """Episodes in the surviving step batches."""
    episodes_per_s: float | None
    """Trained episodes per second, from first issue to end of the last step of each session."""
    mean_token_lag: float | None
    """Versions, over consumed action tokens."""
    max_token_lag: int | None
    wall_s: float
    """Time between first and last event, added over sessions."""
    ended: str
    """Reason of the end: `done`, `interrupted`, `fault`, or `unfinished`."""
    retries: int
    """Attempts beyond the first of a group's member."""
    failures: dict[str, int]
    """`kind/reason` -> attempts that infrastructure failed."""
    drops: dict[str, int]
    """Reason -> episodes."""
    lag_tokens: dict[int, int]
    """Lag in versions -> consumed action tokens."""
    overlap: float | None
    """Share of the trainer's busy time in which engines decoded."""
    phases: dict[str, tuple[float, float]]
    """Phase of a training step -> (mean seconds, share)."""
    waits: timing.Waits | None

    def as_json(self) -> dict[str, str | int | float | None]:
        """The object that `train --json` prints."""
        return {
            "run": self.run,
            "steps": self.steps,
            "base_pass_rate": self.base_pass_rate,
            "heldout_pass_rate": self.heldout_pass_rate,
            "gain": None if self.gain is None else self.gain.mean,
            "gain_low": None if self.gain is None else self.gain.low,
            "gain_high": None if self.gain is None else self.gain.high,
            "reads_per_episode": self.reads_per_episode,
            "episodes_launched": self.episodes_launched,
            "episodes_trained": self.episodes_trained,
            "episodes_per_s": self.episodes_per_s,
            "mean_token_lag": self.mean_token_lag,
            "max_token_lag": self.max_token_lag,
            "wall_s": self.wall_s,
        }


def summarise(run_dir: Path) -> Summary:
    """Summarise a run, also a killed or unfinished one.

    Raises:
        RunDirectoryError: `run_dir` is no directory, or its ledger is not one.
    """
    return summary_of(read_run(run_dir))


def summary_of(records: Records) -> Summary:
    """The summary of records that were read already."""
    history = records.history
    evaluations = evaluations_of(history)
    base = next((e for e in evaluations if e.payload["step"] == 0), None)
    last = evaluations[-1] if evaluations and evaluations[-1] is not base else None
    launched = [a for a in history.attempts if a.split == "train"]
    trained = sum(len(step.trained) for step in history.steps)
    seconds = _training_s(history)
    lag_tokens = _lag_tokens(history)
    tokens = sum(lag_tokens.values())
    return Summary(
        run=records.name,
        steps=len(history.steps),
        base_pass_rate=_value(base, "heldout_pass_rate"),
        heldout_pass_rate=_value(last, "heldout_pass_rate"),
        gain=None if base is None or last is None else paired_gain(base.payload, last.payload),
        base_reads_per_episode=_value(base, "reads_per_episode"),
        reads_per_episode=_value(last, "reads_per_episode"),
        episodes_launched=len(launched),
        episodes_trained=trained,
        episodes_per_s=trained / seconds if seconds else None,
        mean_token_lag=sum(k * n for k, n in lag_tokens.items()) / tokens if tokens else None,
        max_token_lag=max(lag_tokens) if tokens else None,
        wall_s=sum(s[-1].t_mono - s[0].t_mono for s in history.sessions),
        ended=_ended(history),
        retries=len(launched) - len({(a.group, a.member) for a in launched}),
        failures=_failures(history),
        drops=_drops(history),
        lag_tokens=lag_tokens,
        overlap=timing.overlap_share(history),
        phases=timing.phases(history),
        waits=timing.waits(history),
    )


def evaluations_of(history: History) -> list[Event]:
    """In order of steps; of two after one step (a resume) the later, of a voided step none."""
    reached = history.steps[-1].step + 1 if history.steps else 0
    latest = {int(e.payload["step"]): e for e in history.events("eval")}
    return [latest[step] for step in sorted(latest) if step <= reached]


def _value(event: Event | None, key: str) -> float | None:
    value = None if event is None else event.payload.get(key)
    return None if value is None else float(value)


def _training_s(history: History) -> float:
    """Time in which episodes could be trained: first issue to last step of each session."""
    total = 0.0
    for index in range(len(history.sessions)):
        issues = [a.t_issue for a in history.attempts if a.session == index and a.split == "train"]
        ends = [s.t_end for s in history.steps if s.session == index]
        if issues and ends:
            total += max(ends) - min(issues)
    return total


def _lag_tokens(history: History) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for step in history.steps:
        for lag, tokens in lags(step):
            counts[lag] += tokens
    return dict(sorted(counts.items()))


def _failures(history: History) -> dict[str, int]:
    found = (a.finish.get("failure") for a in history.attempts if a.finish is not None)
    kinds = Counter(f"{failure[0]}/{failure[1]}" for failure in found if failure)
    return dict(kinds.most_common())


def _drops(history: History) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for event in history.events("drop"):
        counts[str(event.payload["reason"])] += len(event.payload.get("episodes", ()))
    return dict(counts.most_common())


def _ended(history: History) -> str:
    if not history.sessions:
        return "unfinished"
    ends = [e for e in history.sessions[-1] if e.kind == "run_end"]
    return str(ends[-1].payload["reason"]) if ends else "unfinished"
