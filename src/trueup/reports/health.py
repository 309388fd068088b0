"""The verdicts of a run: the last of each, and in how many steps it failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trueup.diagnostics.health import Verdict, health, stationary
from trueup.reports.markup import Markup, element
from trueup.reports.run import Records
from trueup.reports.svg import number
from trueup.reports.tables import table

_FAMILY = "health/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One verdict over the run."""

    last: Verdict
    """At the last step that it judged."""
    failed: int
    """Steps in which it failed."""
    judged: int
    """Steps in which it was judged."""


def standings(records: Records) -> list[Standing]:
    """Every recorded verdict, those that failed most first."""
    found = []
    for name, rows in records.metrics.items():
        if not name.startswith(_FAMILY):
            continue
        verdict = _last(records, name.removeprefix(_FAMILY), max(rows))
        if verdict is not None:
            failed = sum(metric.sum > 0 for metric in rows.values())
            found.append(Standing(last=verdict, failed=failed, judged=len(rows)))
    return sorted(found, key=lambda s: (-s.failed, s.last.name))


def health_table(found: Sequence[Standing]) -> Markup:
    """Verdict, last value, rule, steps failed, and what a failure means."""
    if not found:
        return element("p", "nothing was judged", class_="muted")
    rows = [
        (
            s.last.name.replace("_", " "),
            number(s.last.value),
            s.last.rule,
            f"{s.failed} of {s.judged}",
            s.last.message if s.failed else "",
        )
        for s in found
    ]
    return table(("verdict", "last", "rule", "failed in steps", "meaning"), rows, words={0, 2, 4})


def _last(records: Records, name: str, step: int) -> Verdict | None:
    """The verdict at a step, judged again from what the step recorded."""
    metrics = {key: rows[step] for key, rows in records.metrics.items() if step in rows}
    if name == "stationary":
        sizes = records.metrics.get("gap/abs_log_ratio", {})
        return stationary([sizes[i] for i in sorted(sizes) if i <= step])
    config = records.config
    verdicts = health(
        metrics,
        corrects=config is not None and config.correction.preset != "none",
        n_changed=_changed(records, step),
        precision=None if config is None else config.engine.precision,
    )
    return next((v for v in verdicts if v.name == name), None)


def _changed(records: Records, step: int) -> int | None:
    """Elements that the version of a step changed in the engine's dtype."""
    after = {s.step: s.version + 1 for s in records.history.steps}
    return {row.version: row.n_changed for row in records.versions}.get(after.get(step, -1))
