import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.gaps import make_gap, ratio_gap
from trueup.diagnostics.metrics import METRICS, metrics_of
from trueup.diagnostics.mismatch import mismatch, mismatch_values
from trueup.diagnostics.numerics import quantile
from trueup.diagnostics.sketch import QuantileSketch

NAN = math.nan


def test_figures_worked_out_by_hand():
    # d = .1, −.3 | .2; the missing token is in no figure.
    found = mismatch(
        make_gap([[-1.0, -2.3, -9.0], [-0.8]], [[-1.1, -2.0, NAN], [-1.0]], lags=[[0, 2, 5], [2]])
    )
    assert (found.tokens, found.missing) == (3, 1)
    assert found.abs_mean == pytest.approx(0.2, abs=1e-6)
    assert found.abs_median == pytest.approx(0.2, abs=1e-6)
    assert found.abs_p95 == pytest.approx(0.29, abs=1e-6)  # rank 1.9 between .2 and .3
    assert found.abs_p99 == pytest.approx(0.298, abs=1e-6)
    assert found.abs_max == pytest.approx(0.3, abs=1e-6)
    assert found.k1 == pytest.approx(0.0, abs=1e-6)
    assert found.k2 == pytest.approx((0.01 + 0.09 + 0.04) / 6, abs=1e-6)
    # e^.1 − 1.1 = .0051709, e^−.3 − .7 = .0408182, e^.2 − 1.2 = .0214028
    assert found.k3 == pytest.approx(0.0224640, abs=1e-6)
    # |e^−1 − e^−1.1|, |e^−2.3 − e^−2|, |e^−.8 − e^−1| = .0350084, .0350764, .0814496
    assert found.probability_mean == pytest.approx(0.0505115, abs=1e-6)
    assert found.episode_sum_max == pytest.approx(0.2, abs=1e-6)
    # .1·e^.1 − e^.1 + 1 = .0053462, −.3·e^−.3 − e^−.3 + 1 = .0369363, .2·e^.2 − e^.2 + 1 = .0228778
    assert found.reverse_kl == pytest.approx(0.0217201, abs=1e-6)
    # e^.2, e^−.6, e^.4 = 1.2214028, .5488116, 1.4918247
    assert found.chi_square == pytest.approx(0.0873464, abs=1e-6)
    # Σd = −.2 | .2: log((e^−.4 + e^.4)/2) = log 1.0810724
    assert found.renyi_episodes == pytest.approx(0.0779535, abs=1e-6)
    assert [(b.low, b.tokens) for b in found.breakdowns["lag"]] == [(0, 1), (2, 2)]
    assert found.breakdowns["lag"][1].abs_mean == pytest.approx(0.25, abs=1e-6)


def test_probability_bins_are_closed_below_and_the_last_above():
    p = [0.05, 0.1000001, 0.4999999, 0.5, 0.9000001, 1.0]
    logs = torch.tensor(p).log().tolist()
    found = mismatch(make_gap([[x + 0.5 for x in logs]], [logs]))
    bins = found.breakdowns["probability"]
    assert [b.tokens for b in bins] == [1, 2, 1, 2]
    assert [(b.low, b.high) for b in bins] == [
        (0, 0.1),
        (0.1, 0.5),
        (0.5, 0.9),
        (0.9, 1),
    ]
    for b in bins:
        assert b.abs_mean == pytest.approx(0.5, abs=1e-6)


def test_without_tokens_every_figure_is_zero():
    found = mismatch(ratio_gap([[NAN], []]))
    assert (found.tokens, found.missing, found.breakdowns["lag"]) == (0, 1, ())
    assert found.abs_mean == found.abs_max == found.k3 == found.episode_sum_max == 0


def test_raw_extremes_are_not_clamped():
    found = mismatch(ratio_gap([[1e4, 0.0]]))
    assert found.abs_max == 1e4
    assert math.isfinite(found.k3)


@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30))
def test_k2_and_k3_are_never_negative_and_quantiles_are_ordered(d):
    found = mismatch(ratio_gap([d]))
    assert found.k2 >= 0
    assert found.k3 >= -1e-12
    assert found.abs_median <= found.abs_p95 <= found.abs_p99 <= found.abs_max


@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=30), st.floats(0, 1))
def test_quantiles_are_the_linear_ones(values, share):
    x = torch.tensor(values, dtype=torch.float64)
    expected = float(torch.quantile(x, share))
    assert float(quantile(x.sort().values, share)) == pytest.approx(expected, abs=1e-9)


def test_the_entropy_of_the_target_is_estimated_from_what_the_behaviour_sampled():
    found = metrics_of(mismatch_values(make_gap([[-1.0, -2.0]], [[-1.5, -2.0]])))
    assert found["gap/entropy"].mean == pytest.approx((math.exp(0.5) + 2) / 2)
    # From 40,000 samples of μ: within .03 of the entropy of π, five standard errors.
    gen = torch.Generator().manual_seed(0)
    pi, mu = (torch.randn(10, generator=gen).log_softmax(-1) for _ in range(2))
    a = torch.multinomial(mu.exp(), 40_000, replacement=True, generator=gen)
    gap = make_gap([pi[a].tolist()], [mu[a].tolist()])
    estimate = metrics_of(mismatch_values(gap))["gap/entropy"].mean
    assert estimate == pytest.approx(float(-(pi.exp() * pi).sum()), abs=0.03)


def test_the_metrics_of_two_shards_merge_to_those_of_the_whole():
    d = torch.randn(40, generator=torch.Generator().manual_seed(0)).tolist()
    rows = [d[:3], d[3:10], [NAN, d[10]], d[11:12], d[12:30], d[30:]]
    lags = [[i] * len(row) for i, row in enumerate(rows)]
    whole = metrics_of(mismatch_values(ratio_gap(rows, lags=lags)))
    left, right = (
        metrics_of(mismatch_values(ratio_gap(rows[part], lags=lags[part])))
        for part in (slice(0, 2), slice(2, 6))
    )
    for name, expected in whole.items():
        if METRICS[name].reducer == "batch":
            continue
        found = left[name].merge(right[name])
        assert (found.count, found.min, found.max) == (expected.count, expected.min, expected.max)
        assert found.sum == pytest.approx(expected.sum, rel=1e-12, abs=1e-12)
    sketches = [
        QuantileSketch.of(gap.log_ratio[gap.valid].abs())
        for gap in (ratio_gap(rows[:2]), ratio_gap(rows[2:]), ratio_gap(rows))
    ]
    assert sketches[0].merge(sketches[1]).to_bytes() == sketches[2].to_bytes()
