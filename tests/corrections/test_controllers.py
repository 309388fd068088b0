import math

import pytest
import torch

from support.gaps import ratio_gap
from trueup.corrections.compose import apply, correct
from trueup.corrections.controllers import at_floor, learning_rate_factor, without_weights
from trueup.corrections.table import PRESETS


def test_the_learning_rate_falls_with_the_square_root_of_the_effective_size():
    """Episodes of weight 2 and 1/2: ESS/B = 2.5² / (2 · 4.25)."""
    gap = ratio_gap([[math.log(2)], [-math.log(2)]])
    made = correct(gap, preset="tis", params={"cap": 9.0})
    assert learning_rate_factor(made.metrics) == pytest.approx(math.sqrt(6.25 / 8.5))


def test_without_weights_or_without_episodes_the_learning_rate_stays():
    gap = ratio_gap([[1.0], [-1.0]])
    assert learning_rate_factor(correct(gap, preset="none").metrics) == 1
    assert learning_rate_factor({}) == 1


def test_when_all_is_rejected_the_factor_is_zero():
    gap = ratio_gap([[3.0], [3.0]])
    assert learning_rate_factor(correct(gap, preset="mis").metrics) == 0


@pytest.mark.parametrize(
    ("rows", "lags", "floor", "off"),
    [
        ([[0.01, -0.03], [0.02]], None, 0.02, True),  # mean |d| is .02, in float32 a hair below
        ([[0.01, -0.03], [0.02]], None, 0.019, False),
        ([[0.01, -0.03], [0.02]], [[0, 1], [0]], 0.5, False),  # one stale token
        ([[math.nan], [math.nan]], None, 0.5, False),  # nothing is known
        ([[0.01, math.nan], [0.01]], None, 0.011, True),
    ],
)
def test_a_fresh_batch_within_the_floor_needs_no_correction(rows, lags, floor, off):
    assert at_floor(ratio_gap(rows, lags=lags), floor=floor + 1e-6 * off) == off


@pytest.mark.parametrize("preset", PRESETS)
def test_without_its_weights_a_preset_rejects_the_same_and_weighs_one(preset):
    gap = ratio_gap([[0.1, 3.0], [-0.4, 0.2], [0.0, -2.0]], turns=[[0, 0]] * 3)
    options = {
        "params": {},
        "advantage": "group",
        "zero_variance": "drop",
        "denominator": "all",
        "max_lag": None,
    }
    whole = apply(gap, PRESETS[preset], **options)
    bare = apply(gap, without_weights(PRESETS[preset]), **options)
    assert torch.equal(bare.keep, whole.keep)
    assert torch.equal(bare.weight, whole.keep.float())
    assert torch.equal(bare.advantages, whole.advantages)
