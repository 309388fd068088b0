"""Blind causes: is a hidden fault named, and is nothing named on a sound engine?

Each run draws, from its seed alone, a small model, a realistic update (some Adam steps of a
cross-entropy at the learning rate of the recipes), an arithmetic, and a planted fault of
`trueup.engines.lying` or none. The diagnosis gets the engine behind its port, the manifests and
weights of the two versions, and the architecture: nothing of the fault. Two thirds of the runs are
faulty, every fault of the kit among them.

    python bench/blind_causes.py [--runs 30] [--seed 0] [--write] [--json]

prints one line per run (not with `--json`) and the figures `named_right` and `false_on_clean` as
JSON; `--write` writes the confusion matrix to docs/blind-causes.md.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from trueup.diagnosis.diagnose import Diagnosis
from trueup.diagnosis.exam import Questions, Release
from trueup.diagnosis.examine import examine
from trueup.engines.base import Engine
from trueup.engines.embedded.core import EmbeddedCore
from trueup.engines.embedded.engine import EmbeddedEngine
from trueup.engines.lying import FAULTS, Forge, plant
from trueup.models.load import state_tensors
from trueup.sync.digest import digest
from trueup.sync.inprocess import InProcessTransport

PAGE = Path(__file__).parents[1] / "docs" / "blind-causes.md"
VOCABULARY, POSITIONS, LR = 64, 256, 5e-4
STOP = 3
SLOTS = 48
CLEAN = "none"
ARITHMETIC = (
    ("float32", "none"),
    ("bfloat16", "none"),
    ("float32", "int8"),
    ("bfloat16", "int8"),
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run hides."""

    seed: int
    fault: str
    dtype: str
    quantize: str

    @property
    def precision(self) -> str:
        """As spans name it."""
        return self.dtype if self.quantize == "none" else f"{self.dtype}+{self.quantize}"


def plans(runs: int, seed: int) -> list[Run]:
    """The hidden faults: a third of the runs have none, the others go through the kit."""
    rng = Random(seed)
    faults = list(FAULTS)
    rng.shuffle(faults)
    clean = runs // 3
    hidden = [CLEAN] * clean + [faults[i % len(faults)] for i in range(runs - clean)]
    rng.shuffle(hidden)
    found = []
    for fault in hidden:
        dtype, quantize = rng.choice(ARITHMETIC)
        demands = FAULTS[fault].demands if fault != CLEAN else {}
        quantize = demands.get("quantize", quantize)
        found.append(Run(seed=rng.randrange(2**31), fault=fault, dtype=dtype, quantize=quantize))
    return found


def architecture(rng: Random) -> Any:
    """A random causal LM of one of several stock shapes, in float32."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    kind, extra = rng.choice(
        [
            (LlamaConfig, {}),
            (LlamaConfig, {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
            (Qwen2Config, {"num_key_value_heads": 2}),
            (Qwen3Config, {"num_key_value_heads": 2, "head_dim": 16}),
        ]
    )
    config = kind(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=rng.choice([128, 176]),
        num_hidden_layers=rng.choice([2, 3, 4]),
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        **extra,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(rng.randrange(2**31))
        model: Any = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        # Some tokens are almost certain and some are not, as in a trained model.
        model.get_output_embeddings().weight.mul_(2.0)
    return model.train(False)


def updated(model: Any, rng: Random) -> Any:
    """The next version: one to four Adam steps."""
    new = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    optimiser = torch.optim.Adam(new.parameters(), lr=LR)
    for _ in range(rng.randint(1, 4)):
        ids = torch.randint(0, VOCABULARY, (16, 32), generator=generator)
        optimiser.zero_grad()
        new(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
    return new.requires_grad_(False)


def play(run: Run) -> tuple[Diagnosis, float]:
    """Build the engine, hide the fault, diagnose; returns the diagnosis and its seconds."""
    rng = Random(run.seed)
    before = architecture(rng)
    after = updated(before, rng)
    dtype = getattr(torch, run.dtype)
    if run.quantize == "none":  # a quantised engine rounds from the trainer's float32
        before, after = before.to(dtype), after.to(dtype)
    transport = InProcessTransport()
    manifests = [transport.publish(n, state_tensors(m)) for n, m in ((1, before), (2, after))]
    old, new = (Release.of(manifest, transport.fetch(manifest)) for manifest in manifests)
    engine = hidden(run, copy.deepcopy(before).to(dtype), transport)
    questions = Questions(prompts=prompts(rng), stop_ids=(STOP,), seed=run.seed)

    async def main() -> Diagnosis:
        try:
            found = await examine(engine, before, old=old, new=new, questions=questions)
            return found[1]
        finally:
            await engine.close()

    begin = time.perf_counter()
    found = asyncio.run(main())
    return found, time.perf_counter() - begin


def hidden(run: Run, model: Any, transport: InProcessTransport) -> Engine:
    """The engine with its fault, or a sound one."""
    forge = Forge(transport.fetch, digest)
    demands = FAULTS[run.fault].demands if run.fault != CLEAN else {}
    core = EmbeddedCore(
        model,
        engine_id="blind",
        slots=SLOTS,
        dtype=run.dtype,
        quantize=run.quantize,
        kv_mode=demands.get("kv_mode", "recompute"),
        fetch=forge,
        digest=digest,
    )
    engine: Engine = EmbeddedEngine(core)
    return engine if run.fault == CLEAN else plant(engine, run.fault, seed=run.seed, forge=forge)


def prompts(rng: Random) -> list[array[int]]:
    """Random prompts of different lengths."""
    return [
        array("i", [rng.randrange(VOCABULARY) for _ in range(rng.randint(8, 14))])
        for _ in range(200)
    ]


def answer(found: Diagnosis) -> str:
    """What the diagnosis says, in one word."""
    if found.kind == "named":
        return found.cause
    return CLEAN if found.kind == "clean" else found.kind


def figures(rows: Sequence[tuple[Run, str]]) -> dict[str, int]:
    """What is reported: runs named right (a clean one by clean), and faults named on clean ones."""
    return {
        "runs": len(rows),
        "named_right": sum(run.fault == said for run, said in rows),
        "false_on_clean": sum(run.fault == CLEAN and said in FAULTS for run, said in rows),
    }


def page(rows: Sequence[tuple[Run, str]], seed: int, seconds: float) -> str:
    """The confusion matrix as Markdown."""
    counts = Counter((run.fault, said) for run, said in rows)
    names = [CLEAN, *FAULTS]
    said = [n for n in (*names, "not separable") if any(counts[hid, n] for hid in names)]
    found = figures(rows)
    lines = [
        "# Blind causes",
        "",
        "Written by `python bench/blind_causes.py --write`; do not edit.",
        "",
        f"{found['runs']} runs (seed {seed}), each with a hidden fault of `trueup.engines.lying` "
        f"or none: **{found['named_right']} named right, {found['false_on_clean']} faults named on "
        f"{sum(run.fault == CLEAN for run, _ in rows)} sound engines**, in {seconds:.0f} s. "
        "Rows are what was planted, columns what the diagnosis said.",
        "",
        "| planted | runs | " + " | ".join(said) + " |",
        "|---|---|" + "---|" * len(said),
    ]
    for name in names:
        total = sum(counts[name, s] for s in said)
        if total:
            cells = " | ".join(str(counts[name, s] or "") for s in said)
            lines.append(f"| {name} | {total} | {cells} |")
    lines += ["", "| arithmetic | runs | named right |", "|---|---|---|"]
    for precision in sorted({run.precision for run, _ in rows}):
        part = [(run, s) for run, s in rows if run.precision == precision]
        lines.append(f"| {precision} | {len(part)} | {figures(part)['named_right']} |")
    return "\n".join(lines) + "\n"


def told(run: Run, found: Diagnosis, seconds: float) -> str:
    """A run in one line."""
    said = answer(found)
    return (
        f"{'✓' if said == run.fault else '✗'} {run.precision:14} planted {run.fault:24} said "
        f"{said:24} {found.detail[:60]:60} gap {found.gap:.1e} left {found.left:.1e} "
        f"{seconds:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true", help="nothing but the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    begin = time.perf_counter()
    for run in plans(options.runs, options.seed):
        found, seconds = play(run)
        rows.append((run, answer(found)))
        if not options.json:
            print(told(run, found, seconds), flush=True)
    if options.write:
        PAGE.write_text(page(rows, options.seed, time.perf_counter() - begin), encoding="utf-8")
    print(json.dumps({**figures(rows), "seconds": round(time.perf_counter() - begin, 1)}))


if __name__ == "__main__":
    main()
