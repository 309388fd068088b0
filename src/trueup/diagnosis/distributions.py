"""What the trainer's whole distributions say about the sampled tokens, from one pass over logits.

Legend: N action tokens, V vocabulary, C those of one chunk, G temperatures, K truncations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.diagnosis.rollouts import Rollouts
from trueup.diagnosis.scorer import Scorer, Serve
from trueup.gap import distinct

TEMPERATURES = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 1.0, 1.04, 1.1, 1.25, 1.4, 1.6, 2.0, 4.0)
"""Factors on the temperature that a span names."""
NUCLEI = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99)
"""Values of top-p that engines are set to."""
LARGEST = (1, 5, 8, 10, 20, 32, 40, 50, 64, 100)
"""Values of top-k that engines are set to."""


@dataclass(frozen=True, kw_only=True)
class Distributions:
    """Statistics of the distributions that the tokens' labels imply, all float64."""

    logp: Tensor
    """[N] log-prob of the sampled token."""
    entropy: Tensor
    """[N] in nats."""
    variance: Tensor
    """[N] variance of log π over π, in nats²."""
    best: Tensor
    """[N] log-prob of the most probable token."""
    raw: Tensor
    """[N] log-prob of the sampled token at temperature 1."""
    tempered: Tensor
    """[G, N] log-prob at the temperature times each of `TEMPERATURES`."""
    ahead: Tensor
    """[N] probability of all tokens that are more probable than the sampled one."""
    stop: Tensor
    """[N] probability of a token that would have ended the completion."""
    kept: Mapping[str, Tensor]
    """Truncation -> [N] log of the kept mass."""
    outside: Mapping[str, Tensor]
    """Truncation -> [N] bool: the sampled token is not among the kept ones."""


def distributions(scorer: Scorer, rollouts: Rollouts, serve: Serve) -> Distributions:
    """Describe the distribution of every token under what `serve` says of its version."""
    n = len(rollouts.said)
    rows = {name: torch.full((n,), torch.nan, dtype=torch.float64) for name in _NAMES}
    tempered = torch.full((len(TEMPERATURES), n), torch.nan, dtype=torch.float64)
    kept = {name: torch.full((n,), torch.nan, dtype=torch.float64) for name in _truncations()}
    outside = {name: torch.zeros(n, dtype=torch.bool) for name in kept}
    stops = [request.sampling.stop_ids for request in rollouts.requests]
    for version in distinct(rollouts.version)[0].tolist():
        here = rollouts.version == version
        for actions, logits in scorer.logits(rollouts, serve(version)):
            chosen = here[actions]
            at, table = actions[chosen], logits[chosen].double()
            if len(at):
                _fill(rollouts, stops, at, table, rows, tempered, kept, outside)
    return Distributions(tempered=tempered, kept=kept, outside=outside, **rows)


_NAMES = ("logp", "entropy", "variance", "best", "raw", "ahead", "stop")


def _truncations() -> list[str]:
    return [f"top_p {p:g}" for p in NUCLEI] + [f"top_k {k}" for k in LARGEST]


def _fill(
    rollouts: Rollouts,
    stops: list[tuple[int, ...]],
    at: Tensor,
    logits: Tensor,
    rows: Mapping[str, Tensor],
    tempered: Tensor,
    kept: Mapping[str, Tensor],
    outside: Mapping[str, Tensor],
) -> None:
    """Write the statistics of a chunk of tokens."""
    token, temperature = rollouts.token[at, None], rollouts.temperature[at, None]
    logp = (logits / temperature).log_softmax(-1)  # [C, V]
    p = logp.exp()
    own = logp.gather(1, token)
    entropy = -torch.where(p > 0, p * logp, 0.0).sum(-1)
    square = torch.where(p > 0, p * logp.square(), 0.0).sum(-1)
    rows["logp"][at] = own[:, 0]
    rows["entropy"][at] = entropy
    rows["variance"][at] = square - entropy.square()
    rows["best"][at] = logp.amax(-1)
    rows["raw"][at] = logits.log_softmax(-1).gather(1, token)[:, 0]
    rows["ahead"][at] = torch.where(logp > own, p, 0.0).sum(-1)
    flags = torch.zeros_like(p)
    for i, row in enumerate(rollouts.row[at].tolist()):
        flags[i, list(stops[row])] = 1.0
    rows["stop"][at] = (p * flags).sum(-1)
    for g, factor in enumerate(TEMPERATURES):
        table = (logits / (temperature * factor)).log_softmax(-1)
        tempered[g, at] = table.gather(1, token)[:, 0]
    ordered = p.sort(-1, descending=True).values
    sums = ordered.cumsum(-1)
    rank = (logp > own).sum(-1)
    sizes = {f"top_p {q:g}": (sums - ordered < q).sum(-1) for q in NUCLEI}
    sizes |= {f"top_k {k}": torch.full_like(rank, min(k, p.shape[-1])) for k in LARGEST}
    for name, size in sizes.items():
        kept[name][at] = sums.gather(1, (size - 1)[:, None])[:, 0].clamp(max=1.0).log()
        outside[name][at] = rank >= size
