"""What a correction costs beside its peers: token TIS + geometric filter + verl's metric set.

512 rows × 8,192 positions, 30 % of them action tokens in blocks of 64, float32. All contenders run
in this process on the same arrays, one after another in every round; a figure is the median of the
rounds. Extra memory is the growth of the resident peak in a process of its own for each contender.

Peers: verl's rollout-correction helper out of its wheel (`scripts/bench-env`), and TRL's
importance-sampling expression. Equality is judged against verl run in float64, so that neither is
blamed for the other's rounding.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers import trl, verl
from torch import Tensor

from trueup.corrections.compose import apply, correct
from trueup.corrections.table import find
from trueup.diagnostics.mismatch import mismatch
from trueup.diagnostics.retention import retention
from trueup.gap import PolicyGap
from trueup.integrations.padded import Layout, pack
from trueup.integrations.verl_metrics import verl_metrics

PEERS = Path(__file__).parents[1] / ".bench-env"
CAP, LOW, HIGH = 2.0, 0.999, 1.001
DIFFERENCES = (
    "verl's k1 bounds are inverted: its 'a_b' keeps ratios in [1/b, 1/a]; it is given the bounds "
    "that keep the same ratios",
    "verl counts rows without action tokens as rows of mean 0; here they are left out",
    "verl computes k3 and KL without a clamp; here a log-ratio is clamped to ±20 before e^x",
    "verl multiplies by the mask, so a NaN outside it survives in its weights; here it is not read",
    "verl's weights keep the value of rejected tokens, its mask says which; here they are 0",
    "verl adds 1e-8 to denominators: its means are below ours by that share",
)


@dataclass(frozen=True)
class Batch:
    """Padded arrays of one step batch and the same packed."""

    target: Tensor
    behaviour: Tensor
    mask: Tensor
    """[B, T] float32, as verl's trainer hands it over."""
    reward: Tensor
    group: Tensor
    gap: PolicyGap


def make(rows: int, positions: int, *, share: float = 0.3, seed: int = 0) -> Batch:
    """Action tokens in blocks, d ~ N(−σ²/2, σ²) with two in a thousand thirty times as far."""
    gen = torch.Generator().manual_seed(seed)
    block = min(64, positions)
    chosen = torch.rand(rows, positions // block, generator=gen) < share
    chosen[:, 0] = True  # no empty row: peers count them otherwise
    mask = chosen.repeat_interleave(block, 1)
    shape = mask.shape
    behaviour = torch.rand(shape, generator=gen).log_().clamp_(min=-12.0)
    noise = torch.randn(shape, generator=gen).mul_(0.03).sub_(0.03**2 / 2)
    noise[torch.rand(shape, generator=gen) < 2e-3] *= 30
    target = (behaviour + noise).clamp_(max=0.0)
    reward = torch.randint(0, 2, (rows,), generator=gen).float()
    group = torch.arange(rows) // 8
    gap = pack(Layout.of(mask), target=target, behaviour=behaviour, reward=reward, group=group)
    return Batch(target, behaviour, mask.float(), reward, group, gap)


def packed_gap(batch: Batch) -> PolicyGap:
    """The gap anew: a trainer with packed tensors makes one, and its validation is part of it."""
    gap = batch.gap
    return PolicyGap(
        logp_target=gap.logp_target,
        logp_behaviour=gap.logp_behaviour,
        segment_offsets=gap.segment_offsets,
        segment_episode=gap.segment_episode,
        group=gap.group,
        reward=gap.reward,
        version=gap.version,
        lag=gap.lag,
        engine=gap.engine,
    )


def ours(gap: PolicyGap) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Weights [N], keep [N] and verl's metric set."""
    made = apply(
        gap,
        find("tis"),
        params={"cap": CAP},
        filters={"geo": {"low": LOW, "high": HIGH}},
        advantage="group",
        zero_variance="keep",
        denominator="all",
        max_lag=None,
        record=None,
    )
    return made.weight, made.keep, verl_metrics(gap, cap=CAP, band=(LOW, HIGH))


def ours_packed(batch: Batch) -> Any:
    return ours(packed_gap(batch))


def ours_padded(batch: Batch) -> Any:
    layout = Layout.of(batch.mask)
    weight, keep, metrics = ours(
        pack(
            layout,
            target=batch.target,
            behaviour=batch.behaviour,
            reward=batch.reward,
            group=batch.group,
        )
    )
    return layout.unpack(weight), layout.unpack(keep, fill=False), metrics


def ours_large(batch: Batch) -> Any:
    """Everything that a training step records, and the diagnostics with their breakdowns."""
    gap = packed_gap(batch)
    made = correct(
        gap,
        preset="tis",
        params={"cap": CAP},
        filters={"geo": {"low": LOW, "high": HIGH}},
        zero_variance="keep",
    )
    return made, mismatch(gap, advantage=made.advantages), retention(gap, keep=made.keep)


def theirs(helper: Any, batch: Batch, dtype: torch.dtype = torch.float32) -> Any:
    """The call of verl; its k1 bounds are inverted, so that the same ratios are kept."""
    return helper.compute_rollout_correction_and_rejection_mask(
        old_log_prob=batch.target.to(dtype),
        rollout_log_prob=batch.behaviour.to(dtype),
        response_mask=batch.mask.to(dtype),
        rollout_is="token",
        rollout_is_threshold=CAP,
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold=f"{1 / HIGH!r}_{1 / LOW!r}",
    )


def trl_expression(batch: Batch) -> Any:
    return trl.importance_weights(
        batch.target, batch.behaviour, batch.mask, mode="token_truncate", cap=CAP
    )


def difference(helper: Any, batch: Batch) -> dict[str, float]:
    """Largest differences from verl in float64; relative where a figure is above 1."""
    weight, keep, metrics = ours_padded(batch)
    proto, mask, expected = theirs(helper, batch, torch.float64)
    kept = mask.bool()
    of_weight = (weight.double() - proto.batch["rollout_is_weights"])[kept].abs()
    of_metric = {
        name: abs(metrics[name] - value) / max(1.0, abs(value)) for name, value in expected.items()
    }
    return {
        "weights": float(of_weight.max()) if len(of_weight) else 0.0,
        "keep_flags": float((keep != kept).sum()),
        "metrics": max(of_metric.values()),
        "metrics_compared": float(len(of_metric)),
        **{f"metric {k}": v for k, v in of_metric.items() if v > 1e-6},
    }


def timed(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each contender, one call of each per round after a first one."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds + 1):
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            if i:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


CONTENDERS: dict[str, Callable[[Batch], Any]] = {
    "ours_packed": ours_packed,
    "ours_padded": ours_padded,
    "trl": trl_expression,
}


def _grow(name: str, size: tuple[int, int], peer: Path, threads: int, answer: Any) -> None:
    torch.set_num_threads(threads)
    call = partial(theirs, verl.load(peer)) if name == "verl" else CONTENDERS[name]
    batch = make(*size)
    call(make(8, 512))  # loads what is loaded on first use
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident
    before = _resident("VmRSS")
    result = call(batch)
    answer.put(_resident("VmHWM") - before)
    del result


def _resident(field: str) -> float:
    """MB of a memory figure of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def memory(names: list[str], size: tuple[int, int], peer: Path, threads: int) -> dict[str, float]:
    """MB that one call adds to the resident peak: median of three processes for each."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, list[float]] = {name: [] for name in names}
    for name in 3 * names:
        answer = context.Queue()
        process = context.Process(target=_grow, args=(name, size, peer, threads, answer))
        process.start()
        found[name].append(answer.get(timeout=300))
        process.join()
    return {name: statistics.median(grown) for name, grown in found.items()}


def sweep(largest: int) -> dict[str, float]:
    """Nanoseconds per token from 2^16 action tokens to 2^largest."""
    found = {}
    for power in range(16, largest + 1, 2):
        n = 1 << power
        gen = torch.Generator().manual_seed(power)
        behaviour = torch.rand(n, generator=gen).log_().clamp_(min=-12.0)
        target = (behaviour + torch.randn(n, generator=gen).mul_(0.03)).clamp_(max=0.0)
        episodes = max(8, n >> 12)
        zeros = torch.zeros(1, dtype=torch.int64).expand(n)
        gap = PolicyGap(
            logp_target=target,
            logp_behaviour=behaviour,
            segment_offsets=torch.linspace(0, n, episodes + 1).long(),
            segment_episode=torch.arange(episodes),
            group=torch.arange(episodes) // 8,
            reward=torch.randint(0, 2, (episodes,), generator=gen).float(),
            version=zeros,
            lag=zeros,
            engine=zeros,
        )
        start = time.perf_counter()
        ours(gap)
        found[f"2^{power}"] = (time.perf_counter() - start) / n * 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--threads", type=int, choices=(1, 2), default=1)
    parser.add_argument("--peer", type=Path, default=PEERS, help="environment with verl")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--largest", type=int, default=26, help="2^LARGEST tokens end the sweep")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    helper = verl.load(options.peer)
    size = (options.rows, options.positions)
    batch = make(*size)
    contenders = {name: partial(call, batch) for name, call in CONTENDERS.items()}
    seconds = timed({**contenders, "verl": partial(theirs, helper, batch)}, options.rounds)
    seconds |= timed({"ours_large": partial(ours_large, batch)}, 3)
    apart = difference(helper, batch)
    grown = memory([*CONTENDERS, "verl"], size, options.peer, options.threads)
    per_token = sweep(options.largest)
    ratios = {
        "speed_vs_verl_packed": seconds["verl"] / seconds["ours_packed"],
        "speed_vs_verl_padded": seconds["verl"] / seconds["ours_padded"],
        "memory_vs_verl": grown["ours_padded"] / grown["verl"],
        "memory_vs_verl_packed": grown["ours_packed"] / grown["verl"],
        "speed_vs_trl_expr": seconds["trl"] / seconds["ours_packed"],
    }
    result = {
        "name": "corrections",
        "threads": options.threads,
        "ratios": ratios,
        "figures": {
            "tokens": batch.gap.num_tokens,
            "seconds": seconds,
            "extra_mb": grown,
            "difference_from_verl": apart,
            "ns_per_token": per_token,
            "peers": {"verl": verl.version(options.peer), "trl": trl.VERSION},
        },
        "differences": DIFFERENCES,
    }
    if options.json:
        print(json.dumps(result))
        return
    print(f"{batch.gap.num_tokens} action tokens of {size}, {options.threads} threads")
    for name, value in seconds.items():
        memory_text = f"{grown[name]:7.0f} MB" if name in grown else ""
        print(f"  {name:12} {value * 1e3:8.1f} ms {memory_text}")
    for name, value in ratios.items():
        print(f"{name:24} {value:7.2f}")
    print("largest differences:", {k: f"{v:.2g}" for k, v in apart.items()})
    print("ns per token:", {k: round(v, 1) for k, v in per_token.items()})
    for line in DIFFERENCES:
        print("-", line)


if __name__ == "__main__":
    main()
