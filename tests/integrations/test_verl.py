"""verl's knobs, hand-worked. Ratios of the rows: 4 1 1/4, and 2 (one token)."""

import math
from types import ModuleType, SimpleNamespace

import pytest
import torch

from trueup.errors import ConfigError, DataError
from trueup.integrations.verl import (
    compute_rollout_correction_and_rejection_mask,
    correct_rollout,
    install,
    rejection,
    weighting,
)

T = torch.tensor
NAN, LN2 = math.nan, math.log(2)
MASK = T([[1, 1, 1], [0, 1, 0]])
OLD = T([[-2.0, -2.0, -2.0], [NAN, -2.0, NAN]])
ROLLOUT = T([[-2.0 - 2 * LN2, -2.0, -2.0 + 2 * LN2], [NAN, -2.0 - LN2, 0.0]])


def correct(**knobs):
    return correct_rollout(OLD, ROLLOUT, MASK, **knobs)


@pytest.mark.parametrize(
    ("level", "threshold", "weights"),
    [
        ("token", 2.0, [[2.0, 1.0, 0.25], [0.0, 2.0, 0.0]]),
        ("token", "3", [[3.0, 1.0, 0.25], [0.0, 2.0, 0.0]]),
        ("token", "0.5_5", [[4.0, 1.0, 0.0], [0.0, 2.0, 0.0]]),
        ("sequence", 2.0, [[1.0, 1.0, 1.0], [0.0, 2.0, 0.0]]),  # products 1 and 2
        ("sequence", "0.5_1.5", [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]),
    ],
)
def test_weights(level, threshold, weights):
    made, mask, _ = correct(rollout_is=level, rollout_is_threshold=threshold)
    assert torch.allclose(made, T(weights))
    assert torch.equal(mask, MASK)  # a weight of 0 takes nothing out of the mask


@pytest.mark.parametrize(
    ("options", "thresholds", "mask"),
    [
        ("token_k1", "0.5_5", [[1, 1, 0], [0, 1, 0]]),  # verl inverts it and keeps 1/4, not 4
        ("token_k1", 3.0, [[0, 1, 0], [0, 1, 0]]),  # 1/3 ... 3
        ("token_k2", 0.5, [[0, 1, 0], [0, 1, 0]]),  # ½·(2 ln 2)² = .96; ½·(ln 2)² = .24
        ("token_k3", 1.0, [[0, 1, 1], [0, 1, 0]]),  # 1.61, 0, .64; .31
        ("seq_sum_k1", "0.5_1.5", [[1, 1, 1], [0, 0, 0]]),
        ("seq_mean_k1", "0.9_1.1", [[1, 1, 1], [0, 0, 0]]),
        ("seq_sum_k2", 1.0, [[0, 0, 0], [0, 1, 0]]),  # 1.92; .24
        ("seq_mean_k2", 0.5, [[0, 0, 0], [0, 1, 0]]),  # .64; .24
        ("seq_max_k2", 0.9, [[0, 0, 0], [0, 1, 0]]),
        ("seq_sum_k3", 1.0, [[0, 0, 0], [0, 1, 0]]),  # 2.25; .31
        ("seq_mean_k3", 0.5, [[0, 0, 0], [0, 1, 0]]),  # .75; .31
        ("seq_max_k3", 1.0, [[0, 0, 0], [0, 1, 0]]),
        ("token_k1,seq_mean_k3", "0.5_5, 1.0", [[1, 1, 0], [0, 1, 0]]),
        ("seq_max_k3,seq_sum_k1", "5,0.5_1.5", [[1, 1, 1], [0, 0, 0]]),
    ],
)
def test_rejection(options, thresholds, mask):
    weights, made, metrics = correct(rollout_rs=options, rollout_rs_threshold=thresholds)
    assert weights is None
    assert torch.equal(made, T(mask))
    lost = 1 - T(mask).sum().item() / 4
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(lost)


def test_weights_are_those_without_rejection():
    made, mask, _ = correct(
        rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.5_1.5"
    )
    assert torch.allclose(made, T([[2.0, 1.0, 0.25], [0.0, 2.0, 0.0]]))
    assert torch.equal(mask, T([[0, 1, 0], [0, 0, 0]]))


def test_batch_normalisation_divides_by_the_mean_weight():
    made, _, _ = correct(rollout_is="token", rollout_is_batch_normalize=True)
    mean = (2 + 1 + 0.25 + 2) / 4
    assert torch.allclose(made, T([[2.0, 1.0, 0.25], [0.0, 2.0, 0.0]]) / mean)


def test_figures_are_of_the_weights_that_are_returned():
    _, _, metrics = correct(rollout_is="token", rollout_is_batch_normalize=True)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1)
    assert "rollout_corr/rollout_is_max" not in metrics


def test_metrics_keep_verls_names_where_they_mean_the_same():
    _, _, metrics = correct(rollout_is="token")
    named = {k.removeprefix("rollout_corr/"): v for k, v in metrics.items() if "rollout_" in k}
    assert named["kl"] == pytest.approx(-LN2 / 4)
    assert named["k3_kl"] == pytest.approx((3 + 0 - 0.75 + 1 - LN2) / 4)
    assert named["chi2_token"] == pytest.approx((16 + 1 + 1 / 16 + 4) / 4 - 1)
    assert named["rollout_is_mean"] == pytest.approx(5.25 / 4)
    assert named["rollout_is_max"] == 2
    assert named["rollout_is_ratio_fraction_high"] == 0.25
    assert named["rollout_is_eff_sample_size"] == pytest.approx(5.25**2 / (4 * 9.0625))
    assert metrics["trueup/weight/raw/max"] == pytest.approx(4)


def test_a_missing_log_prob_leaves_the_mask_and_every_weight():
    rollout = ROLLOUT.clone()
    rollout[0, 1] = NAN
    made, mask, metrics = correct_rollout(OLD, rollout, MASK, rollout_is="token")
    assert torch.equal(mask, T([[1, 0, 1], [0, 1, 0]]))
    assert made[0, 1] == 0
    assert metrics["trueup/excluded/missing_logp"] == 0.25


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_the_mask_keeps_its_dtype(dtype):
    _, mask, _ = correct_rollout(OLD, ROLLOUT, MASK.to(dtype))
    assert mask.dtype == dtype
    assert torch.equal(mask, MASK.to(dtype))


@pytest.mark.parametrize(
    ("knobs", "field"),
    [
        ({"rollout_is": "geometric"}, "rollout_is"),
        ({"rollout_is": "token", "rollout_is_threshold": "a"}, "rollout_is_threshold"),
        ({"rollout_is": "token", "rollout_is_threshold": "1_2_3"}, "rollout_is_threshold"),
        ({"rollout_is": "token", "rollout_is_threshold": -2.0}, "rollout_is_threshold"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2"}, "rollout_rs_threshold"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "1,2"}, "rollout_rs_threshold"),
    ],
)
def test_knobs_that_cannot_be_meant_are_refused(knobs, field):
    with pytest.raises(ConfigError) as caught:
        correct(**knobs)
    assert caught.value.field == field


def test_an_unknown_option_is_refused():
    with pytest.raises(ConfigError, match="token_k9"):
        correct(rollout_rs="token_k9", rollout_rs_threshold=1.0)


def test_a_mask_without_a_token_is_refused():
    with pytest.raises(DataError, match="response_mask"):
        correct_rollout(OLD, ROLLOUT, torch.zeros_like(MASK))


def test_names_map_to_presets():
    assert weighting("token", "0.5_5.0") == ("mis", {"low": 0.5, "high": 5.0})
    assert weighting("sequence", 3.0) == ("seq-tis", {"cap": 3.0})
    assert weighting(None, 2.0) == ("none", {})
    assert rejection("seq_mean_k3, token_k1, token_k1", "0.01,2") == {
        "seq_mean_k3": {"limit": 0.01},
        "token_k1": {"low": 0.5, "high": 2.0},
    }
    assert rejection("token_k2,token_k3", 2.0) == {
        "token_k2": {"limit": 2.0},
        "token_k3": {"limit": 2.0},
    }
    assert rejection(None, None) == {}


def test_it_takes_the_place_of_verls_function():
    name = "compute_rollout_correction_and_rejection_mask"
    helper = ModuleType("rollout_corr_helper")
    with pytest.raises(ConfigError, match=name):
        install(helper)
    setattr(helper, name, SimpleNamespace())
    install(helper)
    assert getattr(helper, name) is compute_rollout_correction_and_rejection_mask
