import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.gaps import ratio_gap
from trueup.diagnostics.effective_size import effective_size, ess_ratio

logs = st.lists(st.floats(-300, 300), min_size=1, max_size=20)


def test_ratio_of_two_weights():
    # (1 + 3)² / (2 · 10)
    assert float(ess_ratio(torch.tensor([1.0, 3.0]).log())) == pytest.approx(0.8)


def test_rejected_and_absent_samples():
    assert ess_ratio(torch.full((3,), -torch.inf)) == 0
    assert ess_ratio(torch.zeros(0)) == 0
    assert float(ess_ratio(torch.tensor([0.0, -torch.inf, -torch.inf]))) == pytest.approx(1 / 3)


def test_raw_and_applied_by_lag():
    gap = ratio_gap([[0.0, math.log(3)], [math.nan, 0.0]], lags=[[0, 0], [1, 1]])
    raw = effective_size(gap)
    assert [(b.lag, b.tokens) for b in raw.by_lag] == [(0, 2), (1, 1)]
    assert [b.ratio for b in raw.by_lag] == pytest.approx([0.8, 1.0])
    assert raw.tokens == pytest.approx(25 / 33)  # (1+3+1)² / (3 · 11)
    assert raw.episodes == pytest.approx(0.8)  # products 3 and 1
    keep = torch.tensor([True, False, False, True])
    applied = effective_size(gap, weight=torch.ones(4), keep=keep)
    assert applied.tokens == pytest.approx(2 / 3)
    assert applied.episodes == pytest.approx(1.0)
    only = effective_size(gap, weight=torch.ones(4), keep=keep, among=gap.episode == 1)
    assert (only.tokens, only.episodes) == (1.0, 1.0)


def test_everything_rejected_is_zero():
    gap = ratio_gap([[0.1], [0.2]])
    found = effective_size(gap, weight=torch.zeros(2), keep=torch.zeros(2, dtype=torch.bool))
    assert (found.tokens, found.episodes) == (0.0, 0.0)
    assert effective_size(ratio_gap([[], []])).tokens == 0.0


def test_products_beyond_double_precision_stay_different():
    # Σd = −25 and −200: one episode carries everything.
    found = effective_size(ratio_gap([[-0.25] * 100, [-2.0] * 100]))
    assert found.episodes == pytest.approx(0.5)


@given(logs, st.floats(-300, 300))
def test_the_ratio_is_within_one_over_n_and_one_and_scale_invariant(log_weights, shift):
    x = torch.tensor(log_weights, dtype=torch.float64)
    ratio = float(ess_ratio(x))
    assert 1 / len(x) - 1e-12 <= ratio <= 1
    assert float(ess_ratio(x + shift)) == pytest.approx(ratio, rel=1e-9)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20))
def test_it_equals_one_over_one_plus_squared_variation(log_weights):
    x = torch.tensor(log_weights, dtype=torch.float64)
    w = x.exp()
    expected = 1 / (1 + float(w.var(correction=0) / w.mean().square()))
    assert float(ess_ratio(x)) == pytest.approx(expected, rel=1e-9)
