"""Both forwards against the module they stand for."""

from typing import Any

import numpy as np
import pytest
import torch

from support.embedded import VOCABULARY, tiny
from trueup.engines.embedded.architectures import build_network
from trueup.engines.embedded.fallback import ModuleNetwork
from trueup.engines.embedded.forward import SlimNetwork
from trueup.engines.embedded.memory import Arithmetic
from trueup.engines.embedded.network import Batch, Network, kinds
from trueup.engines.embedded.parameters import Parameters
from trueup.models.load import state_tensors

CPU = torch.device("cpu")
SLIM = ["llama", "llama-gqa-tied-bias", "qwen2", "qwen3"]
MODULE = ["gpt_neox", "opt"]


def build(model: Any, slots: int = 2, head: torch.dtype | None = None) -> Network[Any]:
    arithmetic = Arithmetic(dtype=model.dtype, head_dtype=head or model.dtype)
    return build_network(model, slots, CPU, arithmetic)


def bound(model: object, slots: int = 6, head: torch.dtype | None = None) -> Network[Any]:
    network = build(model, slots, head)
    tensors = state_tensors(model)  # type: ignore[arg-type]
    spec = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    parameters = Parameters(spec, network.fused, CPU)
    with torch.no_grad():
        parameters.copy_from(tensors)
        network.bind(network.prepare(parameters))
    return network


def batch(rows: dict[int, tuple[int, list[int]]], known: dict[int, int] | None = None) -> Batch:
    """Slot -> (cached, new ids), in the order that kinds ask for; slot -> known among them."""
    slots = np.array(sorted(rows))
    cached = np.array([rows[s][0] for s in slots])
    counts = np.array([len(rows[s][1]) for s in slots])
    order = np.argsort(kinds(cached, counts), kind="stable")
    return Batch(
        slots=slots[order],
        cached=cached[order],
        counts=counts[order],
        tokens=np.concatenate([rows[s][1] for s in slots[order]]),
        known=np.array([(known or {}).get(s, 0) for s in slots[order]]),
    )


def reference(model: object, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, -1]  # type: ignore[operator]


@pytest.mark.parametrize("kind", SLIM)
def test_the_slim_forward_serves_the_types_it_names(kind: str) -> None:
    assert isinstance(build(tiny(kind)), SlimNetwork)


@pytest.mark.parametrize("kind", MODULE)
def test_other_types_run_through_their_own_module(kind: str) -> None:
    assert isinstance(build(tiny(kind)), ModuleNetwork)


@pytest.mark.parametrize(
    "overrides",
    [
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ],
)
def test_a_named_type_that_means_something_else_runs_through_its_module(
    overrides: dict[str, object],
) -> None:
    assert isinstance(build(tiny("llama", **overrides)), ModuleNetwork)


@pytest.mark.parametrize("kind", SLIM + MODULE)
def test_ragged_steps_give_the_logits_of_whole_sequences(kind: str) -> None:
    """Joining, decoding, long and short rows, a full prefix again: all in mixed batches."""
    model = tiny(kind)
    network = bound(model)
    rng = np.random.default_rng(0)
    known: dict[int, list[int]] = {slot: [] for slot in range(6)}
    plan = [
        {0: 3, 4: 17},
        {0: 1, 4: 1, 2: 30},
        {0: 1, 1: 5, 2: 1, 3: 5, 4: 20, 5: 70},
        {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1},
        {5: 1, 1: 40},
        {0: -1, 5: -1, 3: 1},  # -1: one new token, and everything before it computed again
        {3: 1, 0: 1},
    ]
    for step in plan:
        rows = {}
        for slot, n in step.items():
            new = rng.integers(0, VOCABULARY, abs(n)).tolist()
            cached = 0 if n < 0 else len(known[slot])
            known[slot] += new
            rows[slot] = (cached, known[slot][cached:])
        made = batch(rows)
        logits = network.forward(made)
        for row, slot in enumerate(made.slots.tolist()):
            expected = reference(model, known[slot])
            assert float((logits[row] - expected).abs().max()) < 2e-5, (step, slot)


@pytest.mark.parametrize("kind", SLIM)
def test_splitting_a_batch_changes_nothing_but_noise(kind: str) -> None:
    model = tiny(kind)
    rng = np.random.default_rng(1)
    rows = {s: (0, rng.integers(0, VOCABULARY, n).tolist()) for s, n in enumerate((1, 1, 4, 9, 33))}
    whole = batch(rows)
    parts = list(whole.split(10))
    assert [part.counts.tolist() for part in parts] == [[1, 1, 4], [9], [33]]
    assert sum(len(part.tokens) for part in parts) == 48
    network = bound(model)
    cut = torch.cat([network.forward(part) for part in parts])
    torch.testing.assert_close(cut, bound(model).forward(whole), atol=2e-5, rtol=0)


def test_kinds_put_single_tokens_first_and_bound_the_padding() -> None:
    counts = np.array([1, 2, 3, 4, 5, 8, 9, 4])
    cached = np.array([70, 0, 1, 0, 0, 0, 0, 60])
    # Doublings of new tokens times 64, plus those of the sequence's length.
    assert kinds(cached, counts).tolist() == [0, 65, 130, 130, 195, 195, 260, 134]


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_a_cleared_slot_leaves_no_nan_behind(kind: str) -> None:
    model = tiny(kind)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
    network = bound(model)
    assert torch.isnan(network.forward(batch({0: (0, [1, 7, 2])}))).all()
    network.clear(0)
    assert torch.isfinite(network.forward(batch({0: (0, [1])}))).all()
    assert torch.isfinite(network.forward(batch({0: (1, [2])}))).all()


def test_bfloat16_differs_from_its_module_by_rounding_only() -> None:
    model = tiny("qwen3", dtype="bfloat16")
    network = bound(model)
    ids = list(range(1, 30))
    logits = network.forward(batch({0: (0, ids)}))
    exact = reference(tiny("qwen3"), ids)
    expected = reference(model, ids).float()
    assert logits.dtype is torch.float32
    # Both are as far from float32 as bfloat16's 8 bits of mantissa make them.
    assert float((logits[0] - exact).abs().max()) < 3 * float((expected - exact).abs().max()) + 0.01


@pytest.mark.parametrize("kind", ["llama", "llama-gqa-tied-bias"])
def test_a_float32_head_does_not_round_the_logits(kind: str) -> None:
    model = tiny(kind, dtype="bfloat16")
    rounded, exact = (
        bound(model, head=head).forward(batch({0: (0, [1, 2, 3])}))
        for head in (None, torch.float32)
    )
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert not torch.equal(exact, exact.bfloat16().float())
    torch.testing.assert_close(exact, rounded, atol=0.05, rtol=0.01)


@pytest.mark.parametrize("kind", ["llama-gqa-tied-bias", "qwen3", "gpt_neox"])
def test_known_tokens_of_a_recomputed_row_are_predicted_by_the_way(kind: str) -> None:
    model = tiny(kind)
    network = bound(model)
    rng = np.random.default_rng(2)
    known = {0: 3, 2: 9}
    ids = {slot: rng.integers(0, VOCABULARY, n).tolist() for slot, n in {0: 8, 1: 5, 2: 30}.items()}
    made = batch({slot: (0, tokens) for slot, tokens in ids.items()}, known)
    last = network.forward(made)
    states = network.states()
    assert states is not None
    behind = network.logits(states).split([known.get(slot, 0) for slot in made.slots.tolist()])
    for row, slot in enumerate(made.slots.tolist()):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([ids[slot]])).logits[0]
        torch.testing.assert_close(last[row], expected[-1], atol=2e-5, rtol=0)
        wanted = expected[len(expected) - 1 - known.get(slot, 0) : -1]
        torch.testing.assert_close(behind[row], wanted, atol=2e-5, rtol=0)
    network.forward(batch({1: (5, [3])}))
    assert network.states() is None


def test_known_tokens_are_the_last_new_ones_of_their_rows() -> None:
    made = batch({0: (0, [5, 6, 7, 8]), 1: (0, [1, 2, 3, 4, 5]), 2: (0, [9])}, {0: 2, 1: 1})
    assert made.tokens.tolist() == [9, 5, 6, 7, 8, 1, 2, 3, 4, 5]
    assert made.tokens[made.known_index()].tolist() == [7, 8, 5]
    assert [part.known.tolist() for part in made.split(5)] == [[0, 2], [1]]
