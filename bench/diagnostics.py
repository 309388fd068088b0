"""What the diagnostics of a step batch cost, by number of tokens, on one thread.

Every function of `trueup.diagnostics` runs on packed action tokens of episodes of about 250 tokens,
with all versions scored; `correct` is the correction with everything that it records.
Usage: python bench/diagnostics.py [--tokens N ...] [--repeats 3] [--json]
"""

import argparse
import json
import time
from collections.abc import Callable

import torch

from trueup.corrections.compose import correct
from trueup.diagnostics.attribution import attribution
from trueup.diagnostics.calibration import calibration
from trueup.diagnostics.effective_size import effective_size
from trueup.diagnostics.health import health
from trueup.diagnostics.labels import label_test
from trueup.diagnostics.mismatch import mismatch
from trueup.diagnostics.retention import retention
from trueup.diagnostics.sketch import QuantileSketch
from trueup.diagnostics.staleness import staleness
from trueup.gap import PolicyGap

EPISODE = 250


def make(tokens: int) -> tuple[PolicyGap, torch.Tensor]:
    """A gap of staleness and engine noise in groups of 8, and log π_{v−1}."""
    generator = torch.Generator().manual_seed(0)
    episodes = max(16, tokens // EPISODE)
    cuts = torch.rand(episodes, generator=generator).cumsum(0)
    offsets = torch.cat([torch.zeros(1), cuts / cuts[-1] * tokens]).round().long()
    target = -torch.rand(tokens, generator=generator) * 3
    lag = torch.randint(3, (tokens,), generator=generator)
    version = target - 0.02 * lag * torch.randn(tokens, generator=generator)
    behaviour = version - 0.03 * torch.randn(tokens, generator=generator)
    gap = PolicyGap(
        logp_target=target,
        logp_behaviour=behaviour.clamp(max=0),
        segment_offsets=offsets,
        segment_episode=torch.arange(episodes),
        group=torch.arange(episodes) // 8,
        reward=torch.randint(2, (episodes,), generator=generator).float(),
        version=10 - lag,
        lag=lag,
        engine=torch.randint(2, (tokens,), generator=generator),
        logp_version=version,
    )
    return gap, version + 0.02 * torch.randn(tokens, generator=generator)


def parts(gap: PolicyGap, before: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Every diagnostic by name."""
    made = correct(gap, preset="tis")
    a, w, keep = made.advantages, made.weight, made.keep
    return {
        "mismatch": lambda: mismatch(gap, advantage=a),
        "attribution": lambda: attribution(gap, advantage=a),
        "label test": lambda: label_test(gap, logp_before=before),
        "calibration": lambda: calibration(gap),
        "effective size": lambda: effective_size(gap, weight=w, keep=keep),
        "staleness": lambda: staleness(gap),
        "retention": lambda: retention(gap, keep=keep, advantage=a, weight=w),
        "sketch": lambda: QuantileSketch.of(gap.log_ratio.abs()).to_bytes(),
        "health": lambda: health(made.metrics, corrects=True, n_changed=1),
        "correct": lambda: correct(gap, preset="tis"),
    }


def best_ms(run: Callable[[], object], repeats: int) -> float:
    """Shortest of several runs, after one that warms up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[3_000, 100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {
        tokens: {name: best_ms(run, options.repeats) for name, run in parts(*make(tokens)).items()}
        for tokens in options.tokens
    }
    if options.json:
        print(json.dumps({"name": "diagnostics", "figures": {"ms": rows}, "ratios": {}}))
        return
    print(f"{'ms on one thread':16}" + "".join(f"{tokens:>12,}" for tokens in rows))
    for name in next(iter(rows.values())):
        print(f"{name:16}" + "".join(f"{row[name]:12.2f}" for row in rows.values()))
    print(f"{'all':16}" + "".join(f"{sum(row.values()):12.2f}" for row in rows.values()))


if __name__ == "__main__":
    main()
