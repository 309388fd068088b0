"""Rollout speed of SmolLM2-135M on two cores, bfloat16, every token with its log-prob.

The embedded engine against transformers' `generate` and continuous batching and, where
`.vllm-env` exists, vLLM's CPU build (eager, in process, in its own environment), on four kinds of
traffic: 32 prompts x 128 tokens, 8 prompts x 4 samples x 128 (a group shares its prompt), 64 x 128
on 64 slots, and 96 prompts that end where the model ends them, refilling 32 slots. The engine's
INT8 (dynamic W8A8) runs the first.
Sides take turns in one process, the others idle; a ratio is the median over repeats of neighbouring
runs. `share_of_bound` is the engine's rate over that of the matrix products of a decode step alone,
on prepacked weights and 32 rows.

Usage: python bench/rollout.py [--json] [--quick] [--repeats N] [--model NAME-OR-DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rollout_sides.breakdown import Products, step_ms
from rollout_sides.engine import Embedded
from rollout_sides.huggingface import ContinuousBatching, Generate
from rollout_sides.traffic import Side, Traffic, prompts
from rollout_sides.vllm_cpu import Vllm

from trueup.models.catalog import obtain
from trueup.models.chat import Renderer

VLLM_PYTHON = Path(__file__).parents[1] / ".vllm-env/bin/python"
SLOTS = 32
GOALS = {
    "speed_vs_generate": 2.0,
    "speed_vs_cb": 4.0,
    "speed_vs_vllm": 1.0,
    "speed_vs_vllm_64": 1.15,
    "int8_vs_bf16": 1.0,
}
RATIOS = {
    "speed_vs_generate": ("flat", "embedded", "generate"),
    "speed_vs_cb": ("flat", "embedded", "cb"),
    "speed_vs_vllm": ("flat", "embedded", "vllm"),
    "speed_vs_vllm_64": ("wide", "embedded_64", "vllm"),
    "int8_vs_bf16": ("flat", "embedded_int8", "embedded"),
    "groups_vs_generate": ("groups", "embedded", "generate"),
    "groups_vs_vllm": ("groups", "embedded", "vllm"),
    "ragged_vs_generate": ("ragged", "embedded", "generate"),
    "ragged_vs_vllm": ("ragged", "embedded", "vllm"),
}
"""Ratio -> traffic, side, side it is compared with."""

Rates = Mapping[tuple[str, str], Sequence[float]]
"""(traffic, side) -> tokens per second of every repeat."""


def kinds_of_traffic(model: Path, *, max_tokens: int) -> dict[str, Traffic]:
    """The four, by name."""
    renderer = Renderer.load(model)
    ids = prompts(renderer, 3 * SLOTS)

    def traffic(name: str, n: int, slots: int = SLOTS, **more: Any) -> Traffic:
        return Traffic(name=name, prompts=ids[:n], max_tokens=max_tokens, slots=slots, **more)

    found = [
        traffic("flat", SLOTS),
        traffic("groups", SLOTS // 4, samples=4),
        traffic("wide", 2 * SLOTS, slots=2 * SLOTS),
        traffic("ragged", 3 * SLOTS, stop_ids=renderer.stop_ids),
    ]
    return {kind.name: kind for kind in found}


def sides_of(model: Path, stack: contextlib.ExitStack, *, vllm: Path | None) -> dict[str, Side]:
    """Everything that samples, loaded and idle."""
    sides: dict[str, Side] = {
        "embedded": Embedded(model, SLOTS),
        "embedded_64": Embedded(model, 2 * SLOTS),
        "embedded_int8": Embedded(model, SLOTS, "int8"),
        "generate": Generate(model),
        "cb": ContinuousBatching(model),
    }
    if vllm is not None:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "vllm.log"
        sides["vllm"] = stack.enter_context(contextlib.closing(Vllm(vllm, model, log)))
    return sides


def measure(
    traffic: Mapping[str, Traffic],
    sides: Mapping[str, Side],
    products: Products,
    repeats: int,
) -> tuple[Rates, list[float]]:
    """Run every pair that a ratio needs, in turns; also the rate of the products alone."""
    pairs = list(
        dict.fromkeys(
            (kind, side)
            for kind, *compared in RATIOS.values()
            for side in compared
            if side in sides and all(other in sides for other in compared)
        )
    )
    for side in dict.fromkeys(side for _, side in pairs):
        kind = next(kind for kind, of in pairs if of == side)
        sides[side].run(traffic[kind])  # caches grow, kernels are chosen
    products.rate(2)
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    bounds = []
    for repeat in range(repeats):
        # Forwards and backwards in turn: a drift of the machine favours nobody.
        for kind, side in pairs if repeat % 2 == 0 else reversed(pairs):
            outcome = sides[side].run(traffic[kind])
            rates[kind, side].append(outcome.rate)
            print(
                f"{repeat + 1}/{repeats} {kind} {side}: {outcome.rate:.0f} tokens/s",
                file=sys.stderr,
            )
        bounds.append(products.rate(20))
    return rates, bounds


def ratios_of(rates: Rates, bounds: Sequence[float]) -> dict[str, float]:
    """Medians over repeats of the ratios of one repeat."""
    found = {
        name: _median_ratio(rates[kind, ours], rates[kind, theirs])
        for name, (kind, ours, theirs) in RATIOS.items()
        if (kind, ours) in rates and (kind, theirs) in rates
    }
    found["share_of_bound"] = _median_ratio(rates["flat", "embedded"], bounds)
    return found


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def run(model: Path, *, repeats: int, vllm: Path | None, max_tokens: int = 128) -> dict[str, Any]:
    """Measure everything; returns ratios and figures."""
    traffic = kinds_of_traffic(model, max_tokens=max_tokens)
    products = Products(model, SLOTS)
    with contextlib.ExitStack() as stack:
        sides = sides_of(model, stack, vllm=vllm)
        rates, bounds = measure(traffic, sides, products, repeats)
    steps = max_tokens // 2
    profile = {
        name: step_ms(sides[name], traffic[kind], steps)
        for name, kind in (
            ("embedded", "flat"),
            ("embedded_64", "wide"),
            ("embedded_int8", "flat"),
        )
    }
    return {
        "name": "rollout",
        "ratios": ratios_of(rates, bounds),
        "figures": {
            "repeats": repeats,
            "tokens_per_s": {
                f"{kind}.{side}": statistics.median(found) for (kind, side), found in rates.items()
            },
            "bound_tokens_per_s": statistics.median(bounds),
            "step_ms": profile,
            "vllm": "measured" if vllm is not None else "no .vllm-env: make vllm",
        },
    }


def show(result: Mapping[str, Any]) -> None:
    """Print the figures for people."""
    for name, value in result["ratios"].items():
        goal = f"  (goal {GOALS[name]})" if name in GOALS else ""
        print(f"{name:20} {value:8.2f}{goal}")
    figures = result["figures"]
    print("tokens per second")
    for name, value in figures["tokens_per_s"].items():
        print(f"  {name:24} {value:8.0f}")
    print(f"  {'products alone':24} {figures['bound_tokens_per_s']:8.0f}")
    for name, parts in figures["step_ms"].items():
        whole = sum(parts.values())
        said = ", ".join(f"{part} {ms:.1f} ({ms / whole:.0%})" for part, ms in parts.items())
        print(f"{name}: {whole:.1f} ms a step: {said}")
    print(f"vLLM: {figures['vllm']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--quick", action="store_true", help="two repeats")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    torch.set_num_threads(2)
    result = run(
        obtain(options.model),
        repeats=2 if options.quick else options.repeats,
        vllm=VLLM_PYTHON if VLLM_PYTHON.exists() else None,
    )
    show(result)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
