"""What asynchrony buys when tools take time: episodes per second against synchronous training.

TinyAgent with injected tool latency, log-normal with a median of 50 ms and σ 1, 64 slots, one seed:
synchronous, then η = 2 with every consumption policy that is asked for. The overlap is that of the
run's own ledger: the share of the trainer's busy time in which engines decoded tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from trueup import config
from trueup.recipes import table
from trueup.reports.summary import summarise
from trueup.training.run import train

LATENCY = ("environment.latency.median_s=0.05", "environment.latency.sigma=1.0")
GOALS = {"accept": 2.0, "wait": 1.6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--policies", nargs="+", default=["accept", "wait"])
    options = parser.parse_args()
    common = [*LATENCY, "engine.slots=64", f"train.steps={options.steps}", "eval.samples=0"]
    runs = {"sync": ("tiny-sync", common)}
    for policy in options.policies:
        runs[policy] = ("tiny-async", [*common, f"schedule.consume={policy}"])
    figures: dict[str, dict[str, float | None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (recipe, overrides) in runs.items():
            train(config.load(table.text(recipe), overrides), Path(folder), name)
            summary = summarise(Path(folder) / name)
            figures[name] = {
                "episodes_per_s": summary.episodes_per_s,
                "overlap": summary.overlap,
                "mean_token_lag": summary.mean_token_lag,
                "max_token_lag": summary.max_token_lag,
            }
            print(name, *(f"{key} {value:.2f}" for key, value in figures[name].items()))
    base = figures["sync"]["episodes_per_s"]
    ratios = {
        f"overlap.{name}_vs_sync": figures[name]["episodes_per_s"] / base
        for name in options.policies
    }
    for name, ratio in ratios.items():
        goal = GOALS.get(name.removeprefix("overlap.").removesuffix("_vs_sync"))
        print(f"{name:28} {ratio:6.2f}" + (f"  (goal {goal})" if goal else ""))
    if options.json:
        print(json.dumps({"name": "overlap", "ratios": ratios, "figures": figures}))


if __name__ == "__main__":
    main()
