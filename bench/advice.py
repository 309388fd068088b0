"""Which correction has the least squared error, in one-step problems whose gradient is known.

V actions, logits 2·N(0,1), rewards N(0,1), sampler logits off by σ·N(0,1); N tokens, batch-mean
baseline. The error of a preset is ‖ĝ − g‖²/‖g‖² with g = π⊙(r − E r), mean over problems and
repeats. It is the evidence behind the rule of `trueup.corrections.advice`.
"""

from __future__ import annotations

import json
from collections import Counter

import torch

from trueup.corrections.whatif import Replay
from trueup.gap import PolicyGap

V, N, PROBLEMS, REPEATS = 100, 64, 30, 8
SIGMAS = (0.5, 1.0, 1.5, 2.0)
PRESETS = ("none", "tis", "mis", "ais")


def gap_of(target: torch.Tensor, behaviour: torch.Tensor, reward: torch.Tensor) -> PolicyGap:
    size = len(target)
    zeros = torch.zeros(size, dtype=torch.int64)
    return PolicyGap(
        logp_target=target,
        logp_behaviour=behaviour,
        segment_offsets=torch.arange(size + 1),
        segment_episode=torch.arange(size),
        group=zeros,
        reward=reward,
        version=zeros,
        lag=zeros,
        engine=zeros,
    )


def errors(sigma: float, seed: int) -> dict[str, float]:
    """Mean error of each preset in one problem."""
    generator = torch.Generator().manual_seed(seed)
    z, reward = (s * torch.randn(V, generator=generator) for s in (2.0, 1.0))
    target = z.log_softmax(-1)
    behaviour = (z + sigma * torch.randn(V, generator=generator)).log_softmax(-1)
    pi = target.exp()
    truth = pi * (reward - (pi * reward).sum())
    replay = Replay(advantage="group")
    found = dict.fromkeys(PRESETS, 0.0)
    for _ in range(REPEATS):
        a = torch.multinomial(behaviour.exp(), N, replacement=True, generator=generator)
        gap = gap_of(target[a], behaviour[a], reward[a])
        for preset in PRESETS:
            decided = replay(gap, preset)
            c = decided.weight * decided.advantages
            gradient = (torch.zeros(V).index_add(0, a, c) - c.sum() * pi) / N
            error = (gradient - truth).square().sum() / truth.square().sum()
            found[preset] += float(error) / REPEATS
    return found


def main() -> None:
    torch.set_num_threads(1)
    result = {}
    for sigma in SIGMAS:
        rows = [errors(sigma, seed) for seed in range(PROBLEMS)]
        result[str(sigma)] = {
            "error": {p: round(sum(row[p] for row in rows) / PROBLEMS, 3) for p in PRESETS},
            "best": dict(Counter(min(row, key=row.__getitem__) for row in rows)),
        }
    print(json.dumps({"bench": "advice", "by_sigma": result}))


if __name__ == "__main__":
    main()
