"""Where the time of a training step goes, and what trueup's own bookkeeping costs of it.

Runs TinyAgent asynchronously for a few steps, then reads the run's ledger. Scheduler and ledger
live in the controller's process beside the trainer; their cost is measured by replaying the run's
own events through a fresh scheduler and its own rows into a fresh ledger.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path

from trueup import config
from trueup.records.ledger import Ledger
from trueup.scheduling import Scheduler, decode, rules_from_dict
from trueup.training.run import train


def main() -> None:
    arguments = _arguments()
    overrides = [f"train.steps={arguments.steps}", "eval.samples=0", *arguments.overrides]
    with tempfile.TemporaryDirectory() as folder:
        train(config.load("", overrides), Path(folder), "bench")
        ledger = Ledger.open(Path(folder) / "bench" / "run.db", readonly=True)
        events = list(ledger.events())
        ledger.close()
        rewrite_s = _rewrite(events, Path(folder) / "copy.db")
    steps = [event.payload for event in events if event.kind == "train"]
    phases: Counter[str] = Counter()
    for step in steps:
        phases.update(step["phases"])
    busy_s = sum(step["t1"] - step["t0"] for step in steps) / len(steps)
    period_s = (steps[-1]["t1"] - steps[0]["t1"]) / (len(steps) - 1)
    per_step = {name: seconds / len(steps) for name, seconds in phases.items()}
    per_step["scheduler"] = _replay(events) / len(steps)
    per_step["ledger"] = rewrite_s / len(steps)
    overhead_s = per_step["scheduler"] + per_step["ledger"] + per_step["correct"]
    result = {
        "name": "step",
        "ratios": {
            "step.bookkeeping_share": overhead_s / period_s,
            "step.trainer_busy": busy_s / period_s,
        },
        "figures": {
            "period_ms": period_s * 1e3,
            "phases_ms": {name: seconds * 1e3 for name, seconds in per_step.items()},
            "ledger_rows_per_step": len(events) / len(steps),
        },
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"a step every {period_s * 1e3:.0f} ms, the trainer busy {busy_s / period_s:.0%} of it")
    for name, seconds in sorted(per_step.items(), key=lambda item: -item[1]):
        print(f"  {name:10} {seconds * 1e3:8.2f} ms  {seconds / period_s:6.1%}")
    print(f"scheduler + ledger + correction: {overhead_s / period_s:.1%} of a step (limit 5 %)")


def _replay(events: list) -> float:
    """Seconds that the scheduler needs for the run's events."""
    ticks = [decode(event.payload["events"]) for event in events if event.kind == "tick"]
    scheduler = Scheduler(rules_from_dict(events[0].payload["schedule"]))
    start = time.perf_counter()
    for tick in ticks:
        scheduler.advance(*tick)
    return time.perf_counter() - start


def _rewrite(events: list, path: Path) -> float:
    """Seconds that the ledger needs for the run's rows, committed as often as the run did."""
    ledger = Ledger.create(path)
    start = time.perf_counter()
    for event in events:
        ledger.append(
            event.kind,
            actor=event.actor,
            episode=event.episode,
            attempt=event.attempt,
            group=event.group,
            version=event.version,
            engine=event.engine,
            payload=event.payload,
        )
        if event.kind == "tick":
            ledger.flush()
    ledger.close()
    return time.perf_counter() - start


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
