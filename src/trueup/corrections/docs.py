"""The pages of docs/corrections, written from the table: `python -m trueup.corrections.docs`.

A page says nothing that `explain` and the code do not know; its row of the estimator lab is read
from the committed result of that experiment.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trueup.corrections.preset import Constant, Preset
from trueup.corrections.table import ALIASES, MOVING, PRESETS, PRICE, aliases_of

LAB = Path("experiments") / "estimator-table" / "result.json"
"""Committed result of the estimator lab, from the root of the repository."""
PAGES = Path("docs") / "corrections"

_HEAD = "<!-- Written by `python -m trueup.corrections.docs` from the table of presets. -->\n"

LabRows = Mapping[str, Mapping[str, Mapping[str, float]]]
"""{preset: {σ: {bias2, variance}}}."""


def pages(lab: LabRows) -> dict[str, str]:
    """Every page by file name."""
    made = {f"{preset.name}.md": page(preset, lab) for preset in PRESETS.values()}
    return {"index.md": index(), **made}


def index() -> str:
    """The page that lists all presets."""
    rows = [
        f"| [`{p.name}`]({p.name}.md) | {_cell(p.formula)} | {_constants(p)} | {p.scope} "
        f"| {_cell(p.source)} |"
        for p in PRESETS.values()
    ]
    names = [f"| `{alias}` | [`{name}`]({name}.md) |" for alias, name in ALIASES.items()]
    return "\n".join(
        [
            _HEAD,
            "# Corrections",
            "",
            "What each does is in [concepts](../concepts/corrections.md); which to choose, on its",
            "page. `correction.preset=NAME` chooses one, `correction.params.KEY=VALUE` sets a",
            "constant, and `correction.filters.NAME={}` puts the filter of another before its",
            "weights.",
            "",
            "d = log π_old − log μ of a token, ρ = e^d, T tokens of an episode, A its advantage.",
            "",
            "| preset | weight | constants | scope | source |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "## Names elsewhere",
            "",
            "They choose the same method, with the constants of our table.",
            "",
            "| name | preset |",
            "|---|---|",
            *names,
            "",
        ]
    )


def page(preset: Preset, lab: LabRows) -> str:
    """The page of one preset."""
    low, high = preset.bounds(preset.resolve({}))
    facts = [
        ("level of the ratio", f"{preset.level.name}: {preset.level.formula}"),
        ("weights of kept tokens", f"{low:.4g} to {high:.4g}"),
        ("scope", preset.scope),
        ("price", PRICE[preset.scope]),
        ("source", preset.source),
    ]
    if preset.filter is not None:
        when = "after the baselines, by the sign of A" if preset.filter.signed else _when(preset)
        facts.insert(1, ("filter", f"level {preset.filter.level.name}; {when}"))
    if others := aliases_of(preset.name):
        facts.append(("also called", ", ".join(f"`{name}`" for name in others)))
    return "\n".join(
        [
            _HEAD,
            f"# `{preset.name}`",
            "",
            preset.meaning,
            "",
            f"    {preset.formula}",
            "",
            f"**When to use it.** {preset.use}",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {_cell(text)} |" for name, text in facts),
            "",
            *_constant_lines(preset.constants),
            *([f"The ratio: {MOVING}.", ""] if preset.moving else []),
            *_lab_lines(lab.get(preset.name, {})),
            f"Config: `correction.preset={preset.name}`"
            + (f"; as a filter: `correction.filters.{preset.name}={{}}`" if preset.filter else ""),
            "",
        ]
    )


def _when(preset: Preset) -> str:
    assert preset.filter is not None
    if preset.filter.level.whole_episode:
        return "the rejected leave their group's baseline"
    return "rewards stay in the baseline"


def _constants(preset: Preset) -> str:
    return ", ".join(f"`{k}` {c.default:g}" for k, c in preset.constants.items()) or "–"


def _constant_lines(constants: Mapping[str, Constant]) -> list[str]:
    if not constants:
        return []
    rows = [
        f"| `{key}` | {c.default:g} | {c.allowed} | {_cell(c.usual) or '–'} | {_cell(c.meaning)} |"
        for key, c in constants.items()
    ]
    head = ["| constant | default | allowed | in use | meaning |", "|---|---|---|---|---|"]
    return [*head, *rows, ""]


def _lab_lines(row: Mapping[str, Mapping[str, float]]) -> list[str]:
    if not row:
        return []
    figures = [f"{cell['bias2']:.3f} / {cell['variance']:.3f}" for cell in row.values()]
    return [
        "On the one-step problem with a known gradient (`trueup reproduce estimator-table`: 100",
        "actions, 64 samples, sampler logits off by N(0, σ²)), squared bias / variance, relative",
        "to the squared gradient:",
        "",
        "| " + " | ".join(f"σ {sigma}" for sigma in row) + " |",
        "|" + "---|" * len(row),
        "| " + " | ".join(figures) + " |",
        "",
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def read_lab(root: Path) -> LabRows:
    """Rows of the estimator lab; none where its result is not there."""
    path = root / LAB
    if not path.exists():
        return {}
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    rows: LabRows = result["one_step"]
    return rows


def main(root: Path) -> None:
    """Write all pages below the root of the repository, and remove those of presets that are gone.

    Args:
        root: Where docs/ is.
    """
    made = pages(read_lab(root))
    folder = root / PAGES
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
