import math

import pytest
import torch

from support.gaps import make_gap, ratio_gap
from trueup.diagnostics.calibration import calibration


def test_mean_and_clustered_error_worked_out_by_hand():
    # ρ = 1, 2 | 3: mean 2; residuals S − mean·n: 3 − 4 = −1 and 3 − 2 = 1.
    # SE = √(2/1 · 2) / 3 = 2/3; z = 1 / (2/3).
    found = calibration(ratio_gap([[0.0, math.log(2)], [math.log(3)], [math.nan]]))
    assert (found.tokens, found.episodes) == (3, 2)
    assert found.ratio_mean == pytest.approx(2.0)
    assert found.standard_error == pytest.approx(2 / 3)
    assert found.z == pytest.approx(1.5)


def test_equal_policies_have_z_zero_and_equal_wrong_ratios_a_finite_huge_one():
    assert calibration(ratio_gap([[0.0] * 3, [0.0]])).z == 0
    wrong = calibration(ratio_gap([[3.0] * 3, [3.0]])).z
    assert 1e6 < wrong < math.inf


def test_it_is_not_defined_for_fewer_than_two_episodes():
    assert calibration(ratio_gap([[1.0, 2.0]])).z == 0
    assert calibration(ratio_gap([[], []])).ratio_mean == 1


def _sampled(temperature_bug):
    """2,000 episodes of 10 tokens from μ = softmax(z + noise), scored under π = softmax(z)."""
    gen = torch.Generator().manual_seed(0)
    z = torch.randn(20, generator=gen)
    mu = torch.log_softmax(z + 0.3 * torch.randn(20, generator=gen), -1)
    pi = torch.log_softmax(z, -1)
    a = torch.multinomial(mu.exp().expand(2000, 20), 10, replacement=True, generator=gen)
    recorded = torch.log_softmax(mu / 0.8, -1) if temperature_bug else mu
    return make_gap(pi[a].tolist(), recorded[a].tolist())


def test_drift_passes_and_a_temperature_bug_does_not():
    # The seed is fixed; under a new one |z| > 4 without a bug has probability 6e-5.
    assert abs(calibration(_sampled(temperature_bug=False)).z) < 4
    assert abs(calibration(_sampled(temperature_bug=True)).z) > 4
