import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.gaps import ratio_gap
from trueup.corrections.adaptive import adaptive
from trueup.corrections.compose import correct

PAPER = {"cap": 5.0, "delta": 0.02, "gamma": 1.2, "beta": 1.0}
LN3, LN8 = math.log(3), math.log(8)


def run(d, a, **overrides):
    return adaptive(torch.tensor(d).double(), torch.tensor(a).double(), **PAPER | overrides)


def test_golden_mixture_of_reliability_and_inflation():
    # w̄ = 1, 3: mean 2, std 1, CV² 1/4, α_ess = 1/√1.25 = .894427. A·w̄ = 1, −3 has std 2, A has 1:
    # α_var = (2 − 1.2)/1.2 = .666667. mean |d| = .549 > δ. α = .227760; weights 1 and 1 + 2α.
    found = run([0.0, LN3], [1.0, -1.0])
    assert float(found.reliability) == pytest.approx(0.894427, abs=1e-6)
    assert float(found.inflation) == pytest.approx(0.666667, abs=3e-6)
    assert float(found.necessity) == 1.0
    assert float(found.alpha) == pytest.approx(0.227760, abs=3e-6)
    assert found.weight.tolist() == pytest.approx([1.0, 1.455521], abs=5e-6)


def test_golden_cap_enters_every_factor():
    # w̄ = 1, min(8, 5): mean 3, std 2, α_ess = 1/√(1 + 4/9) = .832050. A·w̄ = 1, −5: Δσ = 3.
    found = run([0.0, LN8], [1.0, -1.0], gamma=3.0)
    assert float(found.alpha) == pytest.approx(0.832050, abs=1e-6)
    assert found.weight.tolist() == pytest.approx([1.0, 1 + 4 * 0.832050], abs=5e-6)
    # With γ = 1.2: α_var = 1.5 > α_ess, no correction at all.
    assert run([0.0, LN8], [1.0, -1.0]).weight.tolist() == [1.0, 1.0]


def test_golden_small_mismatch_is_corrected_in_proportion():
    # d = ±.01: mean |d| = δ/2; CV = tanh .01, α_ess = .999950; Δσ < γ. α = .5 · .999950.
    found = run([0.01, -0.01], [1.0, -1.0])
    assert float(found.necessity) == pytest.approx(0.5, abs=1e-7)
    assert float(found.inflation) == 0.0
    assert float(found.alpha) == pytest.approx(0.499975, abs=1e-6)
    assert found.weight.tolist() == pytest.approx([1.0050248, 0.9950252], abs=1e-6)


def test_beta_scales_the_penalty():
    # .894427 − .5 · .666667
    assert float(run([0.0, LN3], [1.0, -1.0], beta=0.5).alpha) == pytest.approx(0.561094, abs=3e-6)


@pytest.mark.parametrize(
    ("d", "a"),
    [([LN3], [1.0]), ([LN3] * 4, [1.0, -1.0, 0.5, 2.0]), ([-800.0] * 3, [1.0, 0.0, 2.0])],
)
def test_equal_weights_have_no_spread_and_are_fully_reliable(d, a):
    assert float(run(d, a).reliability) == pytest.approx(1.0, abs=1e-12)


def test_equal_advantages_measure_the_second_moment():
    # Δσ = √((1 + 9)/2) = 2.236068; α_var = .863390.
    found = run([0.0, LN3], [0.7, 0.7])
    assert float(found.inflation) == pytest.approx(0.863390, abs=1e-6)
    assert float(run([0.0, LN3], [0.0, 0.0]).inflation) == 0.0


def test_tiny_advantages_inflate_nothing():
    # std(A·w̄) = 2e-6 over std(A) + ε = 2e-6.
    assert float(run([0.0, LN3], [1e-6, -1e-6]).inflation) == 0.0


def test_without_tokens_nothing_is_mixed():
    found = run([], [])
    assert found.weight.shape == (0,)
    assert float(found.alpha) == 0.0


numbers = st.floats(-30, 30, width=32)


@given(
    pairs=st.lists(st.tuples(numbers, st.floats(-5, 5, width=32)), min_size=1, max_size=20),
    cap=st.floats(1, 10),
    beta=st.floats(0, 3),
)
def test_weights_stay_within_their_bounds(pairs, cap, beta):
    d, a = map(list, zip(*pairs, strict=True))
    found = run(d, a, cap=cap, beta=beta)
    alpha = float(found.alpha)
    assert 0 <= alpha <= 1
    assert float(found.weight.min()) >= 1 - alpha - 1e-12
    assert float(found.weight.max()) <= 1 + alpha * (cap - 1) + 1e-12
    assert 0 < float(found.reliability) <= 1
    assert 0 <= float(found.necessity) <= 1
    assert 0 <= float(found.inflation) < math.inf


@given(a=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=10))
def test_no_gap_leaves_weights_exactly_one(a):
    assert run([0.0] * len(a), a).weight.tolist() == [1.0] * len(a)


def test_a_floor_is_no_mismatch():
    # mean |d| = .05: of the .02 that need everything, .05 − .04 = half.
    found = run([0.05, -0.05], [1.0, -1.0], floor=0.04)
    assert float(found.necessity) == pytest.approx(0.5, abs=1e-6)
    assert float(run([0.03, -0.03], [1.0, -1.0], floor=0.04).necessity) == 0
    assert run([0.03, -0.03], [1.0, -1.0], floor=0.04).weight.tolist() == [1, 1]


def test_each_part_has_the_coefficient_that_it_would_have_alone():
    d, a = [0.0, LN3, 0.01, -0.01, LN8], [1.0, -1.0, 1.0, -1.0, 0.5]
    part = torch.tensor([7, 7, 2, 2, 5])
    together = run(d, a, part=part)
    for value, index in zip((2, 5, 7), range(3), strict=True):
        here = (part == value).nonzero().squeeze(1).tolist()
        alone = run([d[i] for i in here], [a[i] for i in here])
        assert float(together.alpha[index]) == pytest.approx(float(alone.alpha), abs=1e-12)
        assert together.weight[here].tolist() == pytest.approx(alone.weight.tolist(), abs=1e-12)


def test_a_coefficient_per_lag_and_per_episode():
    # Episode 0 at lag 0 agrees, episode 1 at lag 3 does not: only the latter is corrected. Its A is
    # constant, so Δσ = √E[w̄²] = √5 = 2.236, α_var = .863390, α = .894427 − .863390 = .031037.
    gap = ratio_gap([[0.0, 0.0], [0.0, LN3]], rewards=[1, 0], lags=[[0, 0], [3, 3]])
    for preset in ("ais-lag", "ais-episode"):
        made = correct(gap, preset=preset, advantage="group")
        assert made.weight.tolist() == pytest.approx([1, 1, 1, 1 + 2 * 0.031037], abs=5e-6)
        assert made.metrics["adaptive/alpha"].count == 2
        assert made.metrics["adaptive/alpha"].sum == pytest.approx(0.031037, abs=2e-6)


@given(
    triples=st.lists(
        st.tuples(numbers, st.floats(-5, 5, width=32), st.floats(0, 4)), min_size=1, max_size=20
    ),
    cap=st.floats(1, 10),
)
def test_the_second_moment_of_a_gradient_term_is_bounded(triples, cap):
    """E|w·A·s|² ≤ (1 + α(C − 1))² · M_A² · M_s², for any scores s of bounded length."""
    d, a, s = map(list, zip(*triples, strict=True))
    found = run(d, a, cap=cap)
    terms = found.weight * torch.tensor(a).double() * torch.tensor(s).double()
    bound = 1 + float(found.alpha) * (cap - 1)
    largest = max(abs(x) for x in a) * max(s)
    assert float(terms.square().mean()) <= (bound * largest) ** 2 * (1 + 1e-6) + 1e-30


@given(
    pairs=st.lists(st.tuples(numbers, st.floats(-5, 5, width=32)), min_size=1, max_size=12),
    times=st.integers(2, 4),
)
def test_repetition_of_the_batch_changes_nothing(pairs, times):
    d, a = map(list, zip(*pairs, strict=True))
    once, again = run(d, a), run(d * times, a * times)
    torch.testing.assert_close(once.alpha, again.alpha, rtol=1e-6, atol=1e-9)
