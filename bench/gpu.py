"""What a GPU does with the rollout of a 0.6B model: random weights of Qwen3-0.6B's shape.

Needs torch and transformers and nothing else: PYTHONPATH=src python bench/gpu.py. It measures
tokens per second of the embedded engine in bfloat16 and FP8 (weights and activations, a scale per
tensor and per row); how far its log-probs are from those of a full forward, decoding one and 32
sequences; FP8 products by `torch._scaled_mm` against their emulation on the same grid; and a new
version on its way from host memory into the running engine.

Without a GPU it does nothing but say so, unless `--tiny` makes everything small.

Usage: PYTHONPATH=src python bench/gpu.py [--json] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name of the field
from rollout_sides.engine import Embedded
from rollout_sides.traffic import Traffic
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from trueup.diagnostics.effective_size import ess_ratio
from trueup.models.logprobs import action_logprobs
from trueup.models.packed import PackedBatch
from trueup.models.quantization.linears import Kernel, quantized
from trueup.models.quantization.schemes import scheme

PRECISIONS = {"bf16": "none", "fp8": "fp8", "fp8_row": "fp8_row"}
"""Name in the figures -> `EngineConfig.quantize`."""

_SHARP = 4.0
"""Weight of the final norm: of random logits it makes a distribution that is not flat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of everything."""

    shape: dict[str, Any]
    """Of the model, as `Qwen3Config` takes it."""
    slots: tuple[int, ...]
    """Samples at a time, where speed is measured."""
    batches: tuple[int, ...]
    """Samples at a time, where mismatch is measured."""
    tokens: int
    """Of a sample."""
    products: tuple[int, ...]
    """Tokens of a product."""
    repeats: int


_QWEN3_06B = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_TINY = _QWEN3_06B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
FULL = Size(
    shape=_QWEN3_06B,
    slots=(32, 256),
    batches=(1, 32),
    tokens=128,
    products=(16, 256, 4096),
    repeats=3,
)
TINY = Size(shape=_TINY, slots=(4, 8), batches=(1, 4), tokens=8, products=(16, 32), repeats=1)


def build(size: Size, device: str) -> PreTrainedModel:
    """The model in bfloat16; equal on every run of one kind of device."""
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    with torch.device(device):
        model: PreTrainedModel = auto.from_config(Qwen3Config(**size.shape), dtype=torch.bfloat16)
    model.train(False)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").fill_(_SHARP)
    return model


def traffic(size: Size, slots: int, n: int) -> Traffic:
    """Random prompts of 24 to 40 tokens."""
    draw = random.Random(0)
    vocabulary = size.shape["vocab_size"]
    ids = [[draw.randrange(vocabulary) for _ in range(draw.randint(24, 40))] for _ in range(n)]
    return Traffic(name=str(slots), prompts=ids, max_tokens=size.tokens, slots=slots)


def speed(model: PreTrainedModel, size: Size, device: str) -> dict[str, float]:
    """Tokens per second, by precision and slots."""
    found = {}
    for slots in size.slots:
        for name, quantize in PRECISIONS.items():
            engine = Embedded(model, slots, quantize, device=device)
            asked = traffic(size, slots, slots)
            engine.run(asked)
            rates = [engine.run(asked).rate for _ in range(size.repeats)]
            found[f"{name}.{slots}"] = statistics.median(rates)
            engine.core.close()
    return found


@torch.inference_mode()
def mismatch(model: PreTrainedModel, size: Size, device: str) -> dict[str, dict[str, float]]:
    """|d| and ESS of the engine's own samples against a full forward in bfloat16."""
    found = {}
    for name, quantize in PRECISIONS.items():
        for slots in size.batches:
            engine = Embedded(model, slots, quantize, device=device)
            queued = engine.submit(traffic(size, slots, max(4, slots)))
            completions = engine.finish()
            engine.core.close()
            batch = PackedBatch.pack(
                [array("i", queued[c.session]) + c.token_ids for c in completions],
                [
                    array("b", [0] * len(queued[c.session]) + [1] * len(c.token_ids))
                    for c in completions
                ],
            )
            sampled = torch.tensor([logp for c in completions for logp in c.logps])
            full = action_logprobs(model, batch).logp.cpu()
            found[f"{name} decode of {slots} vs full"] = compared(full - sampled)
            if name == "bf16" and slots > 1:
                alone = action_logprobs(model, batch, microbatch_tokens=1).logp.cpu()
                found[f"full forward of {slots} vs of 1"] = compared(full - alone)
    return found


def compared(difference: Tensor) -> dict[str, float]:
    """Of the log-ratios of tokens, [N]."""
    d = difference.abs().double()
    return {
        "mean": float(d.mean()),
        "median": float(d.median()),
        "p99": float(d.quantile(0.99)),
        "max": float(d.max()),
        "ess": float(ess_ratio(difference)),
    }


def products(size: Size, device: str) -> dict[str, dict[str, float]]:
    """FP8 by the machine's kernel against emulation, on the gate and up projection."""
    k, n = size.shape["hidden_size"], 2 * size.shape["intermediate_size"]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(n, k, generator=generator).mul_(0.02).bfloat16().to(device)
    found = {}
    for name in ("fp8", "fp8_row"):
        kinds: tuple[Kernel, ...] = ("real", "emulated")
        real, emulated = (
            quantized(weight, None, scheme(name), dtype=torch.bfloat16, kernel=kind)
            for kind in kinds
        )
        for m in size.products:
            x = torch.randn(m, k, generator=generator).bfloat16().to(device)
            ours, exact = real(x).float(), emulated(x).float()
            found[f"{name}.{m}"] = {
                "relative_difference": float((ours - exact).norm() / exact.norm()),
                "real_us": _microseconds(partial(real, x), size.repeats, device),
                "emulated_us": _microseconds(partial(emulated, x), size.repeats, device),
                "bf16_us": _microseconds(partial(F.linear, x, weight), size.repeats, device),
            }
    return found


def push(model: PreTrainedModel, size: Size, device: str) -> dict[str, float]:
    """A version into the shadow of a running engine, and what its swap holds up."""
    slots = size.slots[0]
    engine = Embedded(model, slots, device=device)
    core = engine.core
    engine.run(traffic(size, slots, slots))
    nbytes = sum(tensor.nbytes for tensor in engine.tensors.values())
    engine.submit(traffic(size, slots, slots))
    core.step()
    ordinary = _seconds(core.step)
    stage_s = []
    for version in range(1, size.repeats + 2):  # the first allocates the shadow
        manifest = engine.transport.publish(version, engine.tensors)
        begin = time.perf_counter()
        core.stage(manifest)
        _synchronize(device)
        stage_s.append(time.perf_counter() - begin)
        swap_s = _seconds(core.swap)
        recompute_s = _seconds(core.step)
    engine.finish()
    core.close()
    host = [_pinned(tensor, device) for tensor in engine.tensors.values()]
    shadow = [torch.empty_like(tensor, device=device) for tensor in host]

    def copy() -> None:
        for source, target in zip(host, shadow, strict=True):
            target.copy_(source, non_blocking=True)

    copy_us = _microseconds(copy, size.repeats, device)
    return {
        "gigabytes": nbytes / 1e9,
        "copy_gb_per_s": nbytes / copy_us / 1e3,
        "stage_verified_gb_per_s": nbytes / 1e9 / statistics.median(stage_s[1:]),
        "step_ms": ordinary * 1e3,
        "swap_ms": swap_s * 1e3,
        "step_with_recompute_ms": recompute_s * 1e3,
    }


def _pinned(tensor: Tensor, device: str) -> Tensor:
    return tensor.pin_memory() if device == "cuda" else tensor


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _microseconds(call: Callable[[], object], repeats: int, device: str) -> float:
    """Of one call, queued one behind the other as a forward does."""
    calls = 10 * repeats
    call()
    _synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    _synchronize(device)
    return (time.perf_counter() - begin) / calls * 1e6


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def run(size: Size, device: str) -> dict[str, Any]:
    """Measure everything; returns ratios and figures."""
    begin = time.perf_counter()
    model = build(size, device)
    rates = speed(model, size, device)
    most = size.slots[-1]
    figures = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "tokens_per_s": rates,
        "mismatch": mismatch(model, size, device),
        "products": products(size, device),
        "push": push(model, size, device),
    }
    figures["seconds"] = time.perf_counter() - begin
    return {
        "name": "gpu",
        "ratios": {"gpu.fp8_vs_bf16": rates[f"fp8.{most}"] / rates[f"bf16.{most}"]},
        "figures": figures,
    }


def show(result: dict[str, Any]) -> None:
    """Print the figures for people."""
    figures = result["figures"]
    print(f"{figures['device']}, {figures['seconds']:.0f} s")
    print("tokens per second, by precision and slots")
    for name, rate in figures["tokens_per_s"].items():
        print(f"  {name:34} {rate:10.0f}")
    for title in ("mismatch", "products"):
        print(title)
        for name, row in figures[title].items():
            print(f"  {name:34} " + "  ".join(f"{key} {value:.3g}" for key, value in row.items()))
    print("push: " + ", ".join(f"{key} {value:.3g}" for key, value in figures["push"].items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU can run in seconds")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        print(json.dumps({"name": "gpu", "skipped": "no GPU here; --tiny runs on a CPU"}))
        return
    result = run(TINY if options.tiny else FULL, device)
    show(result)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
