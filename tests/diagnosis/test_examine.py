"""A hidden fault is named, and nothing is named on a sound engine.

In float32 the margins are hundreds of standard errors wide, so what these tests leave to chance is
only when an update falls into the turns in flight.
"""

import pytest

from support.blind import examined
from trueup.diagnosis.causes import CAUSES
from trueup.engines.lying import FAULTS


def test_the_library_names_every_fault_of_the_kit():
    assert set(FAULTS) == set(CAUSES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sound_engine_is_clean_and_at_its_floor(dtype):
    _, found = examined(seed=3, dtype=dtype)
    assert (found.kind, found.cause) == ("clean", "")
    assert found.gap == found.left <= max(1e-5, 4 * found.floor)


@pytest.mark.parametrize(
    "fault",
    [
        "stale_head",
        "label_by_client",
        "kept_kv_unreported",
        "noop_quantisation",
        "wrong_temperature",
        "appended_eos",
    ],
)
def test_a_planted_fault_is_named(fault):
    _, found = examined(fault, seed=4)
    assert (found.kind, found.cause) == ("named", fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", sorted(FAULTS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_fault_is_named_in_every_arithmetic(fault, dtype):
    if fault == "noop_quantisation" and dtype == "bfloat16":
        pytest.skip("of a tiny model INT8 changes less than bfloat16 does")
    _, found = examined(fault, seed=5, dtype=dtype)
    assert (found.kind, found.cause) == ("named", fault)


def test_the_tensor_and_the_layer_are_named_too():
    _, tensor = examined("old_tensor", seed=6)
    assert tensor.kind == "named"
    assert tensor.detail.startswith("model.layers.")
    _, layer = examined("layer_skipped", seed=6)
    assert layer.detail in {"layer 0", "layer 1"}
