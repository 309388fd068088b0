import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trueup.diagnostics.oracle import Moments, exact_moments, sample_moments

# b₀ = (2, 0), b₁ = (1, 0): ⟨b₀, b₀−b₁⟩ = 2, ‖b₀−b₁‖² = 1.
BY_HAND = Moments(bias=4.0, bias_product=2.0, bias_change=1.0, plain=3.0, weighted=40.0, cross=5.0)


def test_golden_alpha_and_error_of_a_mean_over_samples():
    # n = 4: (2 + (3 − 5)/4) / (1 + (3 + 40 − 10)/4) = 1.5 / 9.25
    assert BY_HAND.alpha(4) == pytest.approx(1.5 / 9.25)
    # α = .5: ‖(2,0) − .5·(1,0)‖² = 2.25; (.25·3 + .25·40 + .5·5)/4 = 13.25/4
    assert BY_HAND.error(0.5, 4) == pytest.approx(2.25 + 13.25 / 4)


def test_golden_published_forms_leave_out_truncation_bias_and_the_number_of_samples():
    assert BY_HAND.alpha_published == pytest.approx((4 + 3 - 5) / (4 + 3 + 40 - 10))
    assert BY_HAND.alpha_simplified == pytest.approx(4 / 44)
    without_truncation = Moments(
        bias=4.0, bias_product=4.0, bias_change=4.0, plain=3.0, weighted=40.0, cross=5.0
    )
    assert without_truncation.alpha(1) == without_truncation.alpha_published


positive = st.floats(0, 10)


@given(
    b0=st.tuples(positive, positive),
    b1=st.tuples(positive, positive),
    n=st.integers(1, 100),
    sigma=st.tuples(positive, positive),
    correlation=st.floats(-1, 1),
)
def test_no_other_alpha_has_a_smaller_error(b0, b1, n, sigma, correlation):
    x, y = torch.tensor(b0).double(), torch.tensor(b1).double()
    moments = Moments(
        bias=float(x @ x),
        bias_product=float(x @ (x - y)),
        bias_change=float((x - y) @ (x - y)),
        plain=sigma[0] ** 2,
        weighted=sigma[1] ** 2,
        cross=correlation * sigma[0] * sigma[1],
    )
    best = moments.error(moments.alpha(n), n)
    assert all(best <= moments.error(i / 100, n) + 1e-9 for i in range(101))


def test_without_a_gap_nothing_is_to_choose():
    none = Moments(bias=0, bias_product=0, bias_change=0, plain=2, weighted=2, cross=2)
    assert none.alpha(8) == 0.0


@pytest.mark.parametrize(("product", "expected"), [(-0.2, 1.0), (-0.6, 0.0)])
def test_where_the_estimated_error_is_not_convex_the_better_end_is_taken(product, expected):
    # MSE(1) − MSE(0) = curvature − 2·gain = −1 − 2·product
    concave = Moments(
        bias=0.1, bias_product=product, bias_change=-1.0, plain=0, weighted=0, cross=0
    )
    assert concave.alpha(8) == expected


PLAIN = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]])
WEIGHT, RATIO = torch.tensor([[2.0], [0.5], [0.8]]), torch.tensor([[4.0], [0.5], [0.8]])
CHANCE = torch.tensor([0.2, 0.5, 0.3])


def expectation(cross_fit):
    """Of the estimated moments over all ordered samples of three."""
    total = torch.zeros(6, dtype=torch.float64)
    for drawn in itertools.product(range(3), repeat=3):
        i = torch.tensor(drawn)
        found = sample_moments(
            PLAIN[i], (WEIGHT * PLAIN)[i], (RATIO * PLAIN)[i], cross_fit=cross_fit
        )
        values = [getattr(found, name) for name in Moments.__slots__]
        total += CHANCE[i].double().prod() * torch.tensor(values, dtype=torch.float64)
    return dict(zip(Moments.__slots__, total.tolist(), strict=True))


def test_cross_fitted_moments_are_unbiased_and_others_too_large():
    gradient = (CHANCE[:, None] * RATIO * PLAIN).sum(0)
    exact = exact_moments(PLAIN, WEIGHT * PLAIN, CHANCE, gradient)
    found = expectation(cross_fit=True)
    for name in Moments.__slots__:
        assert found[name] == pytest.approx(getattr(exact, name), abs=1e-6)
    plug_in = expectation(cross_fit=False)
    assert plug_in["bias"] > exact.bias + 0.1
    assert plug_in["bias_change"] > exact.bias_change + 0.1
    assert plug_in["plain"] == pytest.approx(exact.plain, abs=1e-6)


@pytest.mark.parametrize("samples", [2, 3, 4])
def test_alpha_minimises_the_error_over_every_sample_of_a_problem_with_known_gradient(samples):
    generator = torch.Generator().manual_seed(15)
    z, reward, noise = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    target, behaviour = (x.log_softmax(-1) for x in (z, z + noise))
    pi, mu = target.exp(), behaviour.exp()
    plain = (reward - (pi * reward).sum())[:, None] * (torch.eye(6) - pi)
    weighted = (target - behaviour).exp().clamp(max=3.0)[:, None] * plain
    gradient = (pi[:, None] * plain).sum(0)
    drawn = torch.cartesian_prod(*[torch.arange(6)] * samples)
    chance = mu[drawn].prod(1)
    zero, one = plain[drawn].mean(1) - gradient, weighted[drawn].mean(1) - gradient

    def error(alpha):
        return float((chance * ((1 - alpha) * zero + alpha * one).square().sum(1)).sum())

    moments = exact_moments(plain, weighted, mu, gradient)
    for alpha in (0.0, 0.3, 1.0):
        assert moments.error(alpha, samples) == pytest.approx(error(alpha), rel=1e-9)
    best = moments.alpha(samples)
    assert 0 < best < 1
    assert min(range(1001), key=lambda i: error(i / 1000)) / 1000 == pytest.approx(best, abs=6e-4)
    # The published form, without truncation bias and for one sample, is another.
    assert abs(moments.alpha_published - best) > 0.02
