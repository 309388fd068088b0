"""Episodes of many tokens: what weights of one token miss, and what their product costs.

A token's own ratio leaves two errors: its context comes from the sampler's prefix, and its reward
from the sampler's continuation. Both are exact here, apart and together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trueup.experiments.base import Tell
from trueup.experiments.estimators.effort import Effort
from trueup.experiments.estimators.methods import OTHERS, PUBLISHED
from trueup.experiments.estimators.mismatch import Rows, add
from trueup.simulation.chain import Chain, race
from trueup.simulation.estimator import Draws, chunk_sizes, compare

SAMPLES = 64
SLOWER = (0.2, 0.0)
"""How far the sampler's log-odds of moving are below the target's, behind and on pace: .45 and .5
against .5."""
NOISE = 0.05
"""σ of the sampler's logits around that."""


def problem(length: int) -> Chain:
    """The chain of T tokens: the same two policies, whatever T is."""
    return race(length, slower=SLOWER, noise=NOISE)


def chain(effort: Effort, tell: Tell) -> Rows:
    """Every preset by T."""
    rows: Rows = {}
    for length, repeats in effort.chain.items():
        this = problem(length)
        methods = {**PUBLISHED, **OTHERS}
        batch_repeats = effort.batch_repeats
        found = compare(_chunks(this, repeats), this, methods, batch_repeats=batch_repeats)
        add(rows, str(length), found)
        tell(f"chain, T {length}")
    return rows


def exact(effort: Effort) -> dict[str, dict[str, Any]]:
    """By T: what is known without sampling, relative to ‖g‖²."""
    return {str(length): _exact(problem(length)) for length in effort.chain}


def _exact(this: Chain) -> dict[str, Any]:
    pi, mu = this.policy, this.behaviour
    token = this.expected(prefix=mu, choice=pi, suffix=mu)
    target, behaviour = this.pass_rate
    return {
        "pass_rate_target": target,
        "pass_rate_behaviour": behaviour,
        "none_bias2": _relative(this, this.expected(prefix=mu, choice=mu, suffix=mu)),
        "token_bias2": _relative(this, token),
        "prefix_bias2": _relative(this, this.expected(prefix=mu, choice=pi, suffix=pi)),
        "suffix_bias2": _relative(this, this.expected(prefix=pi, choice=pi, suffix=mu)),
        "token_cosine": float(
            torch.cosine_similarity(token.flatten(), this.gradient.flatten(), dim=0)
        ),
        "product_second_moment": this.product_second_moment,
    }


def _relative(this: Chain, expected: Tensor) -> float:
    g = this.gradient
    return float((expected - g).square().sum() / g.square().sum())


def _chunks(this: Chain, repeats: int) -> Iterator[Draws]:
    generator = torch.Generator().manual_seed(this.length)
    for size in chunk_sizes(repeats, SAMPLES * this.length):
        yield this.draw(size, SAMPLES, generator)
