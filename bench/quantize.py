"""What every way to quantise a rollout does to the gap, and what it costs.

SmolLM2-135M samples at temperature 1 behind a cache, on the grids of each scheme, and the bfloat16
full forward of the same weights scores what it sampled: d = log π − log μ per token. Weights are
quantised from a float32 copy, as an engine does with every version. Layers alternate with plain
ones; their times are CPU times of one thread, the best of many, which load on the machine moves
least.
"""

from __future__ import annotations

import argparse
import json
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F  # noqa: N812  the name of the field
from torch import Tensor

from trueup.diagnostics.effective_size import ess_ratio
from trueup.diagnostics.repetition import explained
from trueup.models.catalog import obtain
from trueup.models.chat import load_tokenizer
from trueup.models.load import load_model
from trueup.models.logprobs import action_logprobs
from trueup.models.packed import PackedBatch
from trueup.models.quantization.fake import block_linears, quantized_forward, quantized_logprobs
from trueup.models.quantization.linears import quantized
from trueup.models.quantization.recording import Recorder, RecordingTap
from trueup.models.quantization.schemes import SCHEMES, Scheme

SHAPES = {"qkv": (960, 576), "gate_up": (3072, 576), "down": (576, 1536)}
"""Outputs and inputs of the model's larger products."""
REAL = ("int8", "fp8", "fp8_row")
"""Schemes that PyTorch has a kernel for here, slow as that of E4M3 is."""
VLLM = {"int8": (0.225, 0.878), "fp8_row": (0.195, 0.919)}
"""Mean |d| in nats and ESS/N of the real kernels of vLLM 0.32 on a CPU, 4096 sampled tokens."""
PROMPT = "Write a short story about {} who lives {}. Begin with what happened on"
WHO = ("a fox", "a king", "a nurse", "a robot", "two sisters", "an old sailor")
WHERE = ("in a tower", "by the sea", "under a bridge", "on the moon", "in a small town")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Tokens, what they were sampled with, and the scales that were used."""

    batch: PackedBatch
    behaviour: Tensor
    """[N] log μ."""
    scales: Tensor | None
    """[N, L] of a scheme whose tokens share them."""


def main() -> None:
    options = _arguments()
    torch.set_num_threads(options.threads)
    directory = options.model or obtain("smollm2-135m")
    model = load_model(directory, dtype=torch.bfloat16)
    prompts = _prompts(directory)
    names = options.schemes or list(SCHEMES)
    figures: dict[str, dict[str, float]] = {}
    for name in ["none", *names]:
        figures[name] = _mismatch(model, prompts, name, options.tokens)
        print(f"{name:14}", *(f"{k} {v:.4f}" for k, v in figures[name].items()), flush=True)
    distances = {key for found in figures.values() for key in found}
    master = {name: linear.weight.float() for name, linear in block_linears(model).items()}
    for name in names:
        figures[name]["quantize_s"] = _seconds(master, SCHEMES[name])
    del master
    torch.set_num_threads(1)
    for name in names:
        for shape, (outputs, inputs) in SHAPES.items():
            for rows in (1, 32):
                ours, plain = _times(outputs, inputs, rows, SCHEMES[name])
                figures[name][f"{shape}.{rows}.ms"] = ours * 1e3
                figures[name][f"{shape}.{rows}.speed_vs_plain"] = plain / ours
        costs = {key: value for key, value in figures[name].items() if key not in distances}
        print(f"{name:14}", *(f"{key} {value:.3f}" for key, value in costs.items()), flush=True)
    ratios = {
        f"quantize.{name}.{key}": value
        for name, found in figures.items()
        for key, value in found.items()
        if "vs_real" in key or (name == "int8" and "vs_plain" in key) or "explained" in key
    }
    for name, (mean, ess) in VLLM.items():
        if name in figures:
            ratios[f"quantize.{name}.abs_mean_vs_vllm"] = figures[name]["abs_mean"] / mean
            ratios[f"quantize.{name}.ess_vs_vllm"] = figures[name]["ess"] / ess
    for name, value in ratios.items():
        print(f"{name:40} {value:.3f}")
    if options.json:
        print(json.dumps({"name": "quantize", "ratios": ratios, "figures": figures}))


def _prompts(directory: Path) -> Tensor:
    """[30, T] prompts of equal length, so that nothing is padded."""
    tokenizer = load_tokenizer(directory)
    ids = [tokenizer.encode(PROMPT.format(who, where)).ids for who in WHO for where in WHERE]
    shortest = min(map(len, ids))
    return torch.tensor([row[-shortest:] for row in ids])


def _mismatch(model, prompts: Tensor, name: str, tokens: int) -> dict[str, float]:
    scheme = SCHEMES.get(name)
    sampled = _sample(model, prompts, scheme, tokens)
    with torch.no_grad():
        target = action_logprobs(model, sampled.batch).logp
    d = target.double() - sampled.behaviour.double()
    size = d.abs().sort().values
    found = {
        "abs_mean": float(size.mean()),
        "abs_median": float(size.median()),
        "abs_p99": float(size.quantile(0.99)),
        "abs_max": float(size[-1]),
        "ess": float(ess_ratio(d)),
    }
    if scheme is not None:
        aware = quantized_logprobs(model, sampled.batch, scheme)
        found["explained"] = explained(d, aware - sampled.behaviour).share
    if name in REAL:
        emulated, real = (
            (target - quantized_logprobs(model, sampled.batch, scheme, kernel=kernel)).double()
            for kernel in ("emulated", "real")
        )
        found |= {
            "emulated_vs_real": float(emulated.abs().mean() / real.abs().mean()),
            "emulated_vs_real_ess": float(ess_ratio(emulated) / ess_ratio(real)),
        }
    if sampled.scales is not None:
        repeated = quantized_logprobs(model, sampled.batch, scheme, scales=sampled.scales)
        found["explained_by_scales"] = explained(d, repeated - sampled.behaviour).share
    return found


@torch.no_grad()
def _sample(model, prompts: Tensor, scheme: Scheme | None, tokens: int) -> Sampled:
    """Continue every prompt by as many tokens, all in one batch."""
    from transformers import DynamicCache

    torch.manual_seed(0)
    layers = list(block_linears(model))
    recorder = Recorder(layers) if scheme is not None and scheme.one_scale else None

    def tap(column: int) -> RecordingTap:
        return recorder.tap((layers[column],), (1,))

    def steps() -> None:
        cache, new = DynamicCache(), prompts
        for _ in range(tokens):
            logits = model(input_ids=new, cache=cache, use_cache=True, logits_to_keep=1).logits
            logp = logits[:, -1].float().log_softmax(-1)
            new = logp.exp().multinomial(1)
            drawn.append(new)
            behaviour.append(logp.gather(1, new))
            if recorder is not None:
                scales.append(recorder.take())

    drawn: list[Tensor] = []
    behaviour: list[Tensor] = []
    scales: list[Tensor] = []
    if scheme is None:
        steps()
    else:
        with quantized_forward(model, scheme, tap=None if recorder is None else tap):
            steps()
    ids = torch.cat([prompts, *drawn], 1).tolist()
    action = array("b", [0] * prompts.shape[1] + [1] * tokens)
    return Sampled(
        batch=PackedBatch.pack([array("i", row) for row in ids], [action] * len(ids)),
        behaviour=torch.cat(behaviour, 1).flatten(),
        scales=torch.stack(scales).repeat(len(ids), 1) if scales else None,
    )


def _seconds(master: dict[str, Tensor], scheme: Scheme) -> float:
    """Wall time to quantise every linear layer, median of three."""
    found = []
    for _ in range(3):
        begin = time.perf_counter()
        for weight in master.values():
            quantized(weight, None, scheme, dtype=torch.bfloat16)
        found.append(time.perf_counter() - begin)
    return median(found)


@torch.inference_mode()
def _times(outputs: int, inputs: int, rows: int, scheme: Scheme) -> tuple[float, float]:
    """CPU seconds of the layer and of a plain bfloat16 product, alternating."""
    weight, x = torch.randn(outputs, inputs), torch.randn(rows, inputs).bfloat16()
    layer, plain = quantized(weight, None, scheme, dtype=torch.bfloat16), weight.bfloat16()
    runs: list[Callable[[], Tensor]] = [lambda: layer(x), lambda: F.linear(x, plain)]
    best = [float("inf")] * 2
    for _ in range(50):
        for which, run in enumerate(runs):
            run()
            begin = time.thread_time()
            for _ in range(20):
                run()
            best[which] = min(best[which], (time.thread_time() - begin) / 20)
    return best[0], best[1]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schemes", nargs="*", help="names of schemes; all if none is given")
    parser.add_argument("--model", type=Path, help="Hugging Face directory")
    parser.add_argument("--tokens", type=int, default=32, help="per prompt, of 30 prompts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
