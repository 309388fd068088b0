"""bench/gpu.py from end to end, small and on the CPU."""

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import gpu  # noqa: E402

LOADED = """
import sys
sys.path.insert(0, sys.argv[1])
import gpu
print(*(name for name in ("pydantic", "msgpack", "pyarrow", "gguf") if name in sys.modules))
"""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_it_runs_from_end_to_end_and_every_figure_is_a_number():
    figures = gpu.run(gpu.TINY, "cpu")["figures"]
    assert figures["tokens_per_s"].keys() == {
        f"{name}.{slots}" for name in gpu.PRECISIONS for slots in (4, 8)
    }
    rows = [*figures["mismatch"].values(), *figures["products"].values(), figures["push"]]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert len(figures["mismatch"]) == 3 * 2 + 1
    # the kernel and the emulation multiply the same numbers: bfloat16 rounds each sum once
    assert all(row["relative_difference"] < 2**-8 for row in figures["products"].values())
    exact, coarse = (figures["mismatch"][f"{name} decode of 4 vs full"] for name in ("bf16", "fp8"))
    assert 0 < exact["mean"] < coarse["mean"]


def test_figures_of_log_ratios_are_those_worked_out_by_hand():
    found = gpu.compared(torch.tensor([0.0, 0.0, 0.0, -math.log(2)]))
    assert found["mean"] == pytest.approx(math.log(2) / 4)
    assert found["median"] == 0.0
    assert found["max"] == pytest.approx(math.log(2))
    assert found["ess"] == pytest.approx(3.5**2 / (4 * 3.25))


def test_the_shape_is_that_of_a_06b_model():
    s = gpu.FULL.shape
    heads = s["head_dim"] * (2 * s["num_attention_heads"] + 2 * s["num_key_value_heads"])
    layer = s["hidden_size"] * (heads + 3 * s["intermediate_size"])
    assert s["num_hidden_layers"] * layer + s["vocab_size"] * s["hidden_size"] == pytest.approx(
        0.596e9, rel=1e-3
    )


def test_it_needs_no_package_that_torch_and_transformers_do_not_bring():
    answer = subprocess.run(
        [sys.executable, "-c", LOADED, str(BENCH)], check=True, capture_output=True, text=True
    )
    assert answer.stdout.split() == []
