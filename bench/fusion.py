"""What the scoring pass costs, and what taking the gate of the step before does to the weights.

TinyAgent, trained synchronously with one optimiser step per step batch, so that the trainer has the
machine to itself while it works. Runs with and without fusion alternate; figures are medians over
the steps of all runs. The error of a gate is the mean |w − w′| of a token between the weights that
the previous step batch's gate gives and those that its own would.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean, median

from trueup import config
from trueup.recipes import table
from trueup.records.ledger import Ledger
from trueup.training.run import train

WAYS = {"fused": ("train.fused=true",), "scored": ("train.fused=false",)}
GATED = {
    "ais": ("correction.preset=ais",),
    "m2po": ("correction.preset=m2po",),
    "normalize": ("correction.normalize=true",),
}
PARTS = ("score", "correct", "train")
"""Phases of a step that fusion changes."""


def main() -> None:
    options = _arguments()
    common = [
        *("train.minibatches=1", "eval.samples=0", f"train.steps={options.steps}"),
        *options.overrides,
    ]
    phases: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    errors: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for way, changes in WAYS.items():
                found = _steps(Path(folder), f"{way}-{repeat}", "tiny-sync", [*common, *changes])
                phases[way] += [row["phases"] for row, _ in found]
        for name, changes in GATED.items():
            gates = ["correction.gate=previous", *changes]
            found = _steps(Path(folder), name, "tiny-async", [*common, *gates])
            errors[name] = mean(values["gate/error"] for _, values in found)
    seconds = {
        way: {
            "step": median(sum(row.values()) for row in rows),
            "update": median(sum(row.get(part, 0.0) for part in PARTS) for row in rows),
            **{part: median(row.get(part, 0.0) for row in rows) for part in PARTS},
        }
        for way, rows in phases.items()
    }
    ratios = {
        f"fusion.{part}": seconds["fused"][part] / seconds["scored"][part]
        for part in ("step", "update")
    } | {f"fusion.gate_error.{name}": error for name, error in errors.items()}
    if options.json:
        print(json.dumps({"name": "fusion", "ratios": ratios, "figures": seconds}))
        return
    for way, parts in seconds.items():
        print(f"{way:8}", *(f"{part} {spent * 1e3:7.1f} ms" for part, spent in parts.items()))
    for name, value in ratios.items():
        print(f"{name:28} {value:.4f}")


def _steps(
    root: Path, name: str, recipe: str, overrides: list[str]
) -> list[tuple[dict, dict[str, float]]]:
    """Of every step but the first two, which warm up: its row, and the means of its metrics."""
    train(config.load(table.text(recipe), overrides), root, name)
    ledger = Ledger.open(root / name / "run.db", readonly=True)
    rows = [event.payload for event in ledger.events(("train",))]
    metrics: dict[int, dict[str, float]] = {}
    for row in ledger.metrics():
        if row.count:
            metrics.setdefault(row.step, {})[row.name] = row.sum / row.count
    ledger.close()
    return [(row, metrics[row["step"]]) for row in rows[2:]]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
