import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.gaps import make_gap, ratio_gap
from trueup.corrections.compose import correct
from trueup.corrections.divergence import binary_kl, k2, k3

# k2 = 2, 2 | .005, .005 | 0; k3 = e² − 3 = 4.3891, e^−2 + 1 = 1.1353 | .00517 twice | 0.
GAP = ratio_gap([[2.0, -2.0], [0.1, 0.1], [0.0]], rewards=[0, 1, 2])
T, F = True, False


@pytest.mark.parametrize(
    ("preset", "limit", "kept"),
    [
        ("k2-token", 2.0, [T, T, T, T, T]),
        ("k2-token", 1.99, [F, F, T, T, T]),
        ("k2-mean", 2.0, [T, T, T, T, T]),
        ("k2-mean", 0.01, [F, F, T, T, T]),
        ("k2-sum", 3.9, [F, F, T, T, T]),
        ("k2-sum", 4.0, [T, T, T, T, T]),
        ("k2-max", 1.99, [F, F, T, T, T]),
        ("k3-token", 1.2, [F, T, T, T, T]),
        ("k3-mean", 2.77, [T, T, T, T, T]),  # (4.3891 + 1.1353)/2 = 2.7622
        ("k3-mean", 2.75, [F, F, T, T, T]),
        ("k3-mean", 0.005, [F, F, F, F, T]),
        ("k3-sum", 5.53, [T, T, T, T, T]),
        ("k3-sum", 5.52, [F, F, T, T, T]),
        ("k3-max", 4.38, [F, F, T, T, T]),
        ("trm", 4.38, [F, F, T, T, T]),
        ("trm", 4.39, [T, T, T, T, T]),
    ],
)
def test_what_is_kept_by_hand(preset, limit, kept):
    made = correct(GAP, preset=preset, params={"limit": limit}, zero_variance="keep")
    assert made.keep.tolist() == kept


def test_errors_of_opposite_sign_cancel_in_the_geometric_filter_alone():
    rows = ratio_gap([[2.0, -2.0], [0.0]])
    assert correct(rows, preset="geo").keep.all()
    assert not correct(rows, preset="k3-mean").keep[:2].any()


def test_trust_region_masking_weighs_what_it_keeps_and_a_plain_filter_does_not():
    params = {"limit": 4.4}
    assert correct(GAP, preset="trm", params=params).weight.tolist() == pytest.approx(
        [math.exp(2), math.exp(-2), math.exp(0.1), math.exp(0.1), 1]
    )
    assert correct(GAP, preset="k3-max", params=params).weight.tolist() == [1] * 5


def test_binary_divergence_by_hand():
    # p = .5, q = .25: .5 ln 2 + .5 ln(.5/.75) = .143841; the other way .25 ln .5 + .75 ln 1.5.
    p, q = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert float(binary_kl(p, q)) == pytest.approx(0.143841, abs=1e-6)
    assert float(binary_kl(q, p)) == pytest.approx(0.130812, abs=1e-6)


def test_binary_divergence_rejects_sure_tokens_sooner_than_rare_ones():
    # Ratio 1/2 or 2 three times: .5 → .25 (.1438 > φ), .01 → .02 (.0060), and 1 → .5 (large).
    gap = make_gap(
        [[math.log(0.25), math.log(0.02), math.log(0.5)], [0.0]],
        [[math.log(0.5), math.log(0.01), 0.0], [0.0]],
    )
    made = correct(gap, preset="kpop")
    assert made.keep.tolist() == [False, True, False, True]  # the last: both policies are sure
    assert made.weight.tolist() == pytest.approx([0, 2, 0, 1], rel=1e-6)
    assert correct(gap, preset="kpop", params={"limit": 0.144}).keep.tolist() == [T, T, F, T]


def test_both_directions_of_the_binary_divergence_must_be_within_the_limit():
    # .5 → .25 and .25 → .5: one direction is .131, the other .144, in either order.
    half, quarter = math.log(0.5), math.log(0.25)
    gap = make_gap([[quarter, half], [0.0]], [[half, quarter], [0.0]])
    assert correct(gap, preset="kpop", params={"limit": 0.135}).keep.tolist() == [F, F, T]
    assert correct(gap, preset="kpop", params={"limit": 0.145}).keep.tolist() == [T, T, T]


@given(d=st.floats(-18, 18))
def test_estimates_of_the_divergence_are_never_negative(d):
    x = torch.tensor([d], dtype=torch.float64)
    assert float(k2(x)) >= 0
    assert float(k3(x)) >= -1e-15


@given(p=st.floats(-20, 0), q=st.floats(-20, 0))
def test_binary_divergence_is_finite_and_zero_between_equals(p, q):
    a, b = torch.tensor([p]), torch.tensor([q])
    assert -1e-15 <= float(binary_kl(a, b)) < math.inf
    assert float(binary_kl(a, a)) == 0
