"""One self-contained file that shows a run to an expert.

It loads nothing and runs nothing: the content security policy forbids scripts and every request,
and names the one style sheet by its hash. What the run wrote is escaped by `markup`. The figures'
data lie in the file as JSON, in a data block that no browser executes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from trueup.records.files import write_atomic
from trueup.reports import episodes, tables
from trueup.reports.charts import draw, legend
from trueup.reports.figure_data import Figure
from trueup.reports.figures import figures_of
from trueup.reports.health import health_table, standings
from trueup.reports.markup import Markup, element
from trueup.reports.probes import probe_table
from trueup.reports.run import Records, read_run
from trueup.reports.selection import selection, selection_table
from trueup.reports.summary import Summary, summary_of
from trueup.reports.svg import TONES
from trueup.reports.tokens import measure_steps

FILE = "report.html"


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run directory, also of a killed or unfinished run.

    Raises:
        RunDirectoryError: `run_dir` is no directory, or its ledger is not one.
    """
    path = run_dir / FILE
    write_atomic(path, render_report(run_dir).encode("utf-8"))
    return path


def render_report(run_dir: Path) -> str:
    """The whole page; see `write_report` for the errors."""
    records = read_run(run_dir)
    summary = summary_of(records)
    tokens, notes = measure_steps(run_dir)
    figures = figures_of(records, summary, tokens)
    body = element(
        "body",
        _title(records, summary),
        _notes([*records.notes, *notes]),
        tables.tiles(records, summary, tokens),
        element("main", *(_figure(f) for f in figures), class_="figures"),
        *_sections(run_dir, records, summary),
        _data(figures, summary),
    )
    return "<!doctype html>\n" + element("html", _head(records.name), body, lang="en")


def _head(name: str) -> Markup:
    style = resources.files("trueup.reports").joinpath("report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return element(
        "head",
        element("meta", charset="utf-8"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}"/>'),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{name} · trueup"),
        element("style", Markup(style)),
    )


def _title(records: Records, summary: Summary) -> Markup:
    facts = [summary.ended, f"{summary.steps} steps"]
    config = records.config
    if config is not None:
        facts += [
            config.model.path,
            f"correction {config.correction.preset}",
            f"staleness ≤ {config.staleness_bound} ({config.schedule.consume})",
            f"seed {config.seed}",
        ]
    return element(
        "header",
        element("h1", summary.run),
        element("p", " · ".join(facts), class_="muted"),
        class_="page",
    )


def _notes(notes: Sequence[str]) -> Markup:
    if not notes:
        return Markup("")
    return element("ul", *(element("li", note) for note in notes), class_="notes")


def _figure(figure: Figure) -> Markup:
    items = [
        element(
            "li",
            element("span", class_=f"sample {item.mark} tone-{item.tone % TONES}"),
            item.name,
        )
        for item in legend(figure)
    ]
    return element(
        "figure",
        element("h2", figure["title"]),
        element("ul", *items, class_="legend") if items else "",
        element("div", draw(figure), class_="scroll"),
        element("figcaption", figure["caption"]),
        class_="wide" if figure["kind"] == "timeline" else None,
        id=figure["id"],
    )


def _sections(run_dir: Path, records: Records, summary: Summary) -> list[Markup]:
    shown = episodes.samples(run_dir)
    explained = (
        "Boxes are tokens that the policy sampled, coloured by the version that sampled them; the "
        "thicker the line below, the wider the gap (from 0.01, 0.05, 0.2, 0.5 nats). Point at one "
        "for its log-probs."
    )
    return [
        element(
            "div",
            _section("Configuration", tables.configuration(records.config)),
            _section("Failures and drops", tables.losses(summary)),
            _section("Provenance", tables.provenance(records.manifest)),
            _section("Time", tables.phases(summary)),
            class_="columns",
        ),
        _section("Health", health_table(standings(records))),
        _section("Loads and probes", probe_table(records), element("p", _PROBES, class_="muted")),
        _section(
            "Selection",
            selection_table(selection(run_dir, records.history)),
            element("p", _SELECTION, class_="muted"),
        ),
        _section(
            "Episodes",
            element("p", explained, class_="muted") if shown else "",
            *(episodes.render(sample) for sample in shown),
        ),
        _folded(_counted("Steps", len(records.history.steps)), tables.steps(records)),
        _folded(_counted("Versions", len(records.versions)), tables.versions(records)),
    ]


_PROBES = (
    "Loads: medians. After a load an engine decodes fixed sequences behind its cache, which the "
    "trainer scores under the version that it claims; the figures are those of the last one, in "
    "nats."
)
_SELECTION = (
    "Means over the episodes of each stage. In brackets: how far, in standard errors, they are "
    "from the episodes that were lost before the stage, where that is 4 or more. Difficulty is 1 − "
    "mean reward of the task."
)


def _section(title: str, *content: str) -> Markup:
    return element("section", element("h2", title), *content)


def _folded(title: str, content: Markup) -> Markup:
    return element("details", element("summary", title), content)


def _rounded(value: Any) -> Any:
    """The same tree with floats to six significant digits, which no figure resolves."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _counted(title: str, rows: int) -> str:
    shown = f"last {tables.MAX_STEPS} of {rows}" if rows > tables.MAX_STEPS else f"{rows}"
    return f"{title} ({shown})"


def _data(figures: Sequence[Figure], summary: Summary) -> Markup:
    """The numbers behind the page; `<`, `>` and `&` are escaped, so the block cannot be left."""
    stored = json.dumps(
        _rounded({"summary": summary.as_json(), "figures": figures}),
        separators=(",", ":"),
        allow_nan=False,
    )
    for character in "<>&":
        stored = stored.replace(character, f"\\u{ord(character):04x}")
    return element("script", Markup(stored), type="application/json", id="data")
