"""Which layers and tensors are worth a forward of every token.

Each is first tried on a few completions. What these exclude by a wide margin, or what would stay
undecided with all tokens because it changes too little, needs no further forward. Of a model with
very many tensors only some are tried at all: one backward pass gives Σ_t r_t δ_kt for all tensors k
at once, where r is the gap of a token and δ_k what the old tensor changes to first order, and
passes with random signs in the place of r give Σ_t δ_kt² [Hutchinson 1990]. Together they say how
much of Σ r² each tensor would explain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from trueup.diagnosis.case import Case
from trueup.diagnosis.contest import slope
from trueup.diagnosis.rollouts import spread
from trueup.diagnosis.scorer import Serving, by_version
from trueup.gap import distinct

Served = Mapping[str, Callable[[int], Serving]]
"""Kind -> what had been in memory when tokens of a version were sampled."""

_MANY = 64
"""Tensors beyond which gradients choose which are tried."""
_TRIED = 8
"""How many of so many tensors are tried."""
_SIGNS = 4
"""Random backward passes."""
_SAMPLE = 16
"""Completions on which each is tried."""
_WIDE = 5.0
"""Standard errors that exclude."""
_BLUNT = 0.25
"""Standard error of a slope that decides nothing, expected with all tokens."""


def old_tensors(case: Case) -> Served:
    """Version v with one changed tensor of version u, the head's left out, by the tensor's name."""
    assert case.old is not None
    old, new = case.old.weights, case.new.weights
    head = case.scorer.head_name
    changed = [n for n in new if n != head and not torch.equal(old[n], new[n])]
    if len(changed) > _MANY:
        changed = _by_gradient(case, changed)

    def serve(name: str) -> Callable[[int], Serving]:
        serving = Serving(weights={**new, name: old[name]})
        return lambda _: serving

    return {name: serve(name) for name in changed}


def without_layers(case: Case) -> Served:
    """Each version with one layer left out, by the layer."""

    def serve(layer: int) -> Callable[[int], Serving]:
        return lambda version: replace(case.serving(version), skipped=layer)

    return {f"layer {n}": serve(n) for n in range(case.scorer.layers)}


def tried(case: Case, served: Served, where: Tensor, best: Tensor) -> Served:
    """Those that a few completions neither exclude nor show to be too weak to tell.

    Args:
        case: Answers and weights.
        served: What to try.
        where: [N] bool, the tokens that it concerns.
        best: [N] log-probs of the best explanation so far, which it has to beat.
    """
    rows = distinct(case.rollouts.row[where])[0]
    if not len(rows):
        return {}
    few = spread(rows, _SAMPLE)
    part, actions = case.rollouts.select(few.tolist()), case.rollouts.packed.actions_of(few)
    use, best = where[actions], best[actions]
    alike = [cluster[use] for cluster in part.clusters]
    share = float(use.sum()) / float(where.sum())
    found = {}
    for name, serve in served.items():
        change = (by_version(case.scorer, part, serve) - best)[use]
        value, error = slope((part.said - best)[use], change, alike)
        if value + _WIDE * error > 0.5 and error * share**0.5 < _BLUNT:
            found[name] = serve
    return found


def _by_gradient(case: Case, names: list[str]) -> list[str]:
    """The tensors that would explain most of the gap by a first-order change."""
    assert case.old is not None
    old, new = case.old.weights, case.new.weights
    where = case.usable & case.labelled_new
    gap = torch.where(where, case.rollouts.said - case.told.logp, 0.0)
    serving, changes = Serving(weights=new), {n: old[n].float() - new[n].float() for n in names}
    along = case.plain.along(case.rollouts, serving, gap, changes)
    generator = torch.Generator().manual_seed(0)
    square = dict.fromkeys(names, 0.0)
    for _ in range(_SIGNS):
        sign = torch.randint(0, 2, gap.shape, generator=generator).double() * 2 - 1
        probe = case.plain.along(case.rollouts, serving, torch.where(where, sign, 0.0), changes)
        for name, value in probe.items():
            square[name] += value**2 / _SIGNS
    explained = {n: along[n] ** 2 / square[n] if square[n] else 0.0 for n in names}
    return sorted(names, key=lambda n: -explained[n])[:_TRIED]
