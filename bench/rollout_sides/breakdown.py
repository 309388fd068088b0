"""Where a decode step of the embedded engine goes, and the most that its products would allow."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig

if TYPE_CHECKING:
    from rollout_sides.engine import Embedded
    from rollout_sides.traffic import Traffic

_GEMM = ("mkldnn::", "aten::addmm", "aten::mm", "aten::linear", "aten::_int_mm", "onednn::")
_ATTENTION = (
    "aten::bmm",
    "aten::baddbmm",
    "aten::softmax",
    "aten::_softmax",
    "aten::scaled_dot_product",
    "aten::_scaled_dot_product",
)
_PROFILED_STEPS = 6


class Timed:
    """A call that adds up the seconds it takes."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        """Call and add."""
        begin = time.perf_counter()
        result = self.call(*arguments)
        self.seconds += time.perf_counter() - begin
        return result


def step_ms(engine: Embedded, traffic: Traffic, steps: int) -> dict[str, float]:
    """Milliseconds of a decode step by what they go to.

    The forward's share of products, attention and the rest is read off a profile of a few further
    steps and applied to the time of unprofiled ones.
    """
    core = engine.core
    engine.submit(traffic)
    core.step()  # prefill
    core.step()  # members of a group that waited for it
    network, sampler = core._network, core._sample
    plain = network.forward
    forward, core._sample = Timed(plain), Timed(sampler)
    network.forward = forward
    begin = time.perf_counter()
    for _ in range(steps):
        core.step()
    whole = time.perf_counter() - begin
    sampling = core._sample.seconds
    network.forward, core._sample = plain, sampler
    shares = _shares(engine)
    engine.finish()
    parts = {name: share * forward.seconds for name, share in shares.items()}
    parts |= {"sampling": sampling, "overhead": whole - forward.seconds - sampling}
    return {name: seconds / steps * 1e3 for name, seconds in parts.items()}


def _shares(engine: Embedded) -> dict[str, float]:
    """Of the forward's time: by operator, without the operators that it calls."""
    network, seconds = engine.core._network, Counter()
    plain = network.forward

    def profiled(batch: Any) -> Any:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            result = plain(batch)
        for event in profile.key_averages():
            seconds[_kind(event.key)] += event.self_cpu_time_total
        return result

    network.forward = profiled
    for _ in range(_PROFILED_STEPS):
        engine.core.step()
    network.forward = plain
    return {name: seconds[name] / seconds.total() for name in ("gemm", "attention", "small_ops")}


def _kind(operator: str) -> str:
    if operator.startswith(_GEMM):
        return "gemm"
    return "attention" if operator.startswith(_ATTENTION) else "small_ops"


class Products:
    """All matrix products of a decode step and nothing else, on prepacked weights.

    Args:
        directory: A Llama, Qwen2 or Qwen3.
        rows: Tokens of a step.
    """

    def __init__(self, directory: Path, rows: int) -> None:
        config: Any = AutoConfig.from_pretrained(directory, local_files_only=True)
        hidden, inner = config.hidden_size, config.intermediate_size
        dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
        queries = config.num_attention_heads * dim
        layer = [
            (hidden, queries + 2 * config.num_key_value_heads * dim),
            (queries, hidden),
            (hidden, 2 * inner),
            (inner, hidden),
        ]
        shapes = [*layer * config.num_hidden_layers, (hidden, config.vocab_size)]
        self._rows = rows
        # Every layer its own weights, so that a cache holds no more of them than in the engine.
        self._products = [
            (torch.randn(rows, k).bfloat16(), _packed(torch.randn(n, k).bfloat16()))
            for k, n in shapes
        ]

    @torch.inference_mode()
    def rate(self, steps: int) -> float:
        """Tokens per second."""
        product: Any = torch.ops.mkldnn._linear_pointwise
        begin = time.perf_counter()
        for _ in range(steps):
            for x, weight in self._products:
                product(x, weight, None, "none", [], "")
        return steps * self._rows / (time.perf_counter() - begin)


def _packed(weight: torch.Tensor) -> torch.Tensor:
    pack: Any = torch.ops.mkldnn._reorder_linear_weight
    packed: torch.Tensor = pack(weight, 32)
    return packed
