"""bench/rollout.py on a model of two layers: every side samples what it is asked to."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.gguf_file import small_llama, write_gguf
from trueup.models.gguf import GgufModel

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import rollout
from rollout_sides.engine import Embedded
from rollout_sides.huggingface import ContinuousBatching, Generate

pytest.importorskip("gguf")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_gguf(folder / "model.gguf", small_llama())
    GgufModel(folder / "model.gguf").save(folder)
    return folder


@pytest.mark.parametrize("side", ["embedded", "int8", "generate", "cb"])
def test_every_side_samples_all_that_is_asked(side: str, model: Path):
    made = {
        "embedded": lambda: Embedded(model, rollout.SLOTS),
        "int8": lambda: Embedded(model, rollout.SLOTS, "int8"),
        "generate": lambda: Generate(model),
        "cb": lambda: ContinuousBatching(model),
    }[side]()
    traffic = rollout.kinds_of_traffic(model, max_tokens=5)
    assert made.run(traffic["flat"]).tokens == 32 * 5
    assert made.run(traffic["groups"]).tokens == 8 * 4 * 5
    # 261 words, one of which stops: among 480 tokens fewer than 96 + 1 is beyond chance
    assert 96 < made.run(traffic["ragged"]).tokens <= 96 * 5


def test_the_bench_reports_every_ratio_that_needs_no_vllm(model: Path):
    found = rollout.run(model, repeats=2, vllm=None, max_tokens=20)
    assert found["ratios"].keys() == {
        *(name for name in rollout.RATIOS if "vllm" not in name),
        "share_of_bound",
    }
    assert all(ratio > 0 for ratio in found["ratios"].values())
    for parts in found["figures"]["step_ms"].values():
        assert parts.keys() == {"gemm", "attention", "small_ops", "sampling", "overhead"}
        assert min(parts.values()) > 0


def test_a_ratio_is_the_median_over_neighbouring_runs():
    rates = {("flat", "embedded"): [10.0, 20.0, 90.0], ("flat", "generate"): [5.0, 5.0, 30.0]}
    # 2, 4 and 3
    assert rollout.ratios_of(rates, [20.0, 20.0, 30.0]) == {
        "speed_vs_generate": 3.0,
        "share_of_bound": 1.0,
    }
