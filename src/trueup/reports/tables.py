"""The report's tiles and tables as markup."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trueup.config import Config, fields
from trueup.reports.figures import applied_sizes, floor
from trueup.reports.history import lags
from trueup.reports.markup import Markup, element, join
from trueup.reports.run import Records
from trueup.reports.summary import Summary
from trueup.reports.svg import number
from trueup.reports.timing import periods
from trueup.reports.tokens import StepTokens

MAX_STEPS = 200
"""Rows of the table of steps, and of versions; the ledger has them all."""
STEP_COLUMNS = (
    *("step", "version", "episodes", "reward", "mean lag", "max lag", "|gap|"),
    *("raw ESS", "ESS", "kept", "train s", "wait s", "decode"),
)
State = Literal["good", "bad", "plain"]


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure that matters, with what it means."""

    name: str
    value: str
    note: str
    state: State = "plain"

    def render(self) -> Markup:
        """The tile; its state is told by a word in the note as well as by colour."""
        return element(
            "div",
            element("dt", self.name),
            element("dd", self.value, class_="value"),
            element("dd", self.note, class_="note"),
            class_=f"tile {self.state}",
        )


def tiles(records: Records, summary: Summary, tokens: Sequence[StepTokens]) -> Markup:
    """The verdicts of the run."""
    found = [
        _pass_rate(summary),
        Tile(
            "Reads per episode",
            _arrow(summary.base_reads_per_episode, summary.reads_per_episode),
            "held-out, before → after",
        ),
        Tile(
            "Throughput",
            _or_dash(summary.episodes_per_s, ".2f"),
            f"episodes/s, {summary.episodes_trained} trained in {duration(summary.wall_s)}",
        ),
        _lag(records.config, summary),
        Tile("Overlap", _or_dash(summary.overlap, ".0%"), "of training time engines decoded"),
        _ess(records),
        _gap(records, tokens),
        _waiting(summary),
    ]
    return element("dl", join(tile.render() for tile in found), class_="tiles")


def _pass_rate(summary: Summary) -> Tile:
    before, after = summary.base_pass_rate, summary.heldout_pass_rate
    value, name = _arrow(before, after), "Held-out pass rate"
    if before is None or after is None:
        return Tile(name, value, "before → after")
    gain = summary.gain
    if gain is not None:
        return Tile(name, value, f"gain {gain}", "good" if gain.low > 0 else "plain")
    rose = after > before
    note = f"{'up' if rose else 'down'} by {abs(after - before):.2f}"
    return Tile(name, value, note, "good" if rose else "plain")


def _lag(config: Config | None, summary: Summary) -> Tile:
    mean, most = summary.mean_token_lag, summary.max_token_lag
    value = f"{_or_dash(mean, '.2f')} / {_or_dash(most, 'd')}"
    if config is None or most is None:
        return Tile("Lag mean / max", value, "versions")
    bound, policy = config.staleness_bound, config.schedule.consume
    if most <= bound:
        return Tile("Lag mean / max", value, f"bound {bound} held", "good")
    excess = sum(n for lag, n in summary.lag_tokens.items() if lag > bound)
    share = excess / sum(summary.lag_tokens.values())
    state: State = "plain" if policy in ("accept", "mask") else "bad"
    return Tile("Lag mean / max", value, f"bound {bound}: {share:.1%} beyond ({policy})", state)


def _waiting(summary: Summary) -> Tile:
    if summary.waits is None:
        return Tile("Trainer waits", "–", "share of its time")
    note = f"of its time; engines idle {summary.waits.engine_idle:.0%}"
    return Tile("Trainer waits", f"{summary.waits.trainer_waiting:.0%}", note)


def _ess(records: Records) -> Tile:
    applied = [v for v in applied_sizes(records)["y"] if v is not None]
    if not applied:
        return Tile("Effective size", "–", "ESS ratio of the weights in the loss")
    low = min(applied)
    note = f"ESS ratio, lowest {low:.2f}" + ("" if low >= 0.3 else ": below the alarm at 0.3")
    return Tile(
        "Effective size",
        f"{sum(applied) / len(applied):.3f}",
        note,
        "good" if low >= 0.3 else "bad",
    )


def _gap(records: Records, tokens: Sequence[StepTokens]) -> Tile:
    values = [v for v in records.series("gap/abs_log_ratio")[1] if v is not None]
    base = floor(tokens)
    note = "mean |gap| in nats" + ("" if base is None else f", floor {base:.2g}")
    mean = f"{sum(values) / len(values):.3g}" if values else "–"
    return Tile("Gap", mean, note)


def configuration(config: Config | None) -> Markup:
    """What differs from the defaults, with what it means."""
    if config is None:
        return element("p", "not readable", class_="muted")
    mine, plain = _flat(config.model_dump(mode="json")), _flat(Config().model_dump(mode="json"))
    known = fields()
    rows = [
        (key, _json(value), _json(plain.get(key)), known[key][1] if key in known else "")
        for key, value in mine.items()
        if value != plain.get(key)
    ]
    if not rows:
        return element("p", "Every key has its default.", class_="muted")
    return table(("key", "value", "default", "meaning"), rows, words={0, 3})


def provenance(manifest: Mapping[str, Any]) -> Markup:
    """What produced the run."""
    libraries, hardware = manifest.get("libraries", {}), manifest.get("hardware", {})
    revision, _, changed = str(manifest.get("git_revision") or "").partition("-")
    rows = [
        ("trueup", manifest.get("trueup")),
        ("revision", f"{revision[:12]} {changed}".strip()),
        ("python", manifest.get("python")),
        *((name, libraries.get(name)) for name in ("torch", "transformers")),
        ("processor", hardware.get("cpu")),
        ("cores", hardware.get("cores_usable")),
        ("seeds", _json(manifest.get("seeds", {}))),
        ("command", " ".join(map(str, manifest.get("command", ())))),
    ]
    if not manifest:
        return element("p", "no manifest", class_="muted")
    return table(("", ""), [(name, str(v)) for name, v in rows if v], words={0, 1})


def losses(summary: Summary) -> Markup:
    """Failures, drops and retries by reason."""
    rows = [("failed", reason, str(n)) for reason, n in summary.failures.items()]
    rows += [("dropped", reason, str(n)) for reason, n in summary.drops.items()]
    if summary.retries:
        rows.append(("retried", "further attempts of a member", str(summary.retries)))
    if not rows:
        return element("p", "No attempt failed and no episode was dropped.", class_="muted")
    return table(("what", "reason", "episodes"), rows, words={0, 1})


def phases(summary: Summary) -> Markup:
    """Where a training step spends its time, and who waits for whom."""
    rows = [(n, f"{s:.3f} s", f"{share:.0%}") for n, (s, share) in summary.phases.items()]
    parts = [table(("phase of a step", "mean", "share"), rows, words={0})]
    w = summary.waits
    if w is not None:
        shares = (
            ("trainer trains", w.trainer_training),
            ("trainer waits for episodes", w.trainer_waiting),
            ("trainer publishes", w.trainer_publishing),
            ("trainer stands by during evaluation", w.trainer_evaluating),
            ("engines decode", w.engine_decoding),
            ("engines load weights", w.engine_loading),
            ("engines idle", w.engine_idle),
        )
        cells = [(name, f"{share:.1%}") for name, share in shares if share > 0]
        parts.append(table(("share of the time", ""), cells, words={0}))
    return join(parts)


def steps(records: Records) -> Markup:
    """One row per step batch."""
    waited = {period.step: period for period in periods(records.history)}
    columns = {
        name: dict(zip(*records.series(name), strict=True))
        for name in ("gap/abs_log_ratio", "ess/raw_tokens", "ess/applied_tokens", "kept/tokens")
    }
    rows = []
    for step in records.history.steps[-MAX_STEPS:]:
        lag = lags(step)
        tokens = sum(n for _, n in lag)
        rewards = [a.reward for a in step.arrived if a.reward is not None]
        period = waited.get(step.step)
        rows.append(
            (
                str(step.step),
                str(step.version),
                str(len(step.trained)),
                _or_dash(sum(rewards) / len(rewards) if rewards else None, ".3f"),
                _or_dash(sum(k * n for k, n in lag) / tokens if tokens else None, ".2f"),
                str(max((k for k, _ in lag), default="–")),
                *(_or_dash(column.get(float(step.step)), ".4f") for column in columns.values()),
                _or_dash(step.train["t1"] - step.train["t0"], ".2f"),
                _or_dash(None if period is None else period.waiting, ".2f"),
                _or_dash(None if period is None else period.decoding, ".0%"),
            )
        )
    return table(STEP_COLUMNS, rows)


def versions(records: Records) -> Markup:
    """Published versions and the digests that engines attested."""
    attested: dict[int, set[str]] = {}
    for event in records.events("apply"):
        same = event.payload.get("digest")
        attested.setdefault(event.version, set()).add(f"{event.engine}: {same}")
    rows = []
    for row in records.versions[-MAX_STEPS:]:
        seen = attested.get(row.version, set())
        agree = sum(entry.endswith(f": {row.digest}") for entry in seen)
        verdict = "not applied" if not seen else f"{agree} of {len(seen)} engines agree"
        rows.append((str(row.version), row.digest, number(row.n_changed), verdict))
    return table(("version", "digest", "elements changed", "attested"), rows, words={1, 3})


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, words: Iterable[int] = ()
) -> Markup:
    """A table that scrolls by itself; columns not in `words` are numbers."""
    left = set(words)
    names = [None if i in left else "num" for i in range(len(head))]
    top = element("tr", *(element("th", h, class_=c) for h, c in zip(head, names, strict=True)))
    body = [
        element("tr", *(element("td", v, class_=c) for v, c in zip(row, names, strict=True)))
        for row in rows
    ]
    whole = element("table", element("thead", top), element("tbody", *body))
    return element("div", whole, class_="scroll")


def duration(seconds: float) -> str:
    """Example: `duration(75)` is `"1 min 15 s"`."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, dict) and key != "params"
        found |= _flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return found


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _arrow(before: float | None, after: float | None) -> str:
    return f"{_or_dash(before, '.2f')} → {_or_dash(after, '.2f')}"


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
