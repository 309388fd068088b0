import pytest
import torch

from trueup.corrections.table import PRESETS, find
from trueup.simulation.chain import race
from trueup.simulation.estimator import (
    METHODS,
    Draws,
    EstimateError,
    Method,
    chunk_sizes,
    coefficients,
    compare,
    error_of,
    estimates,
)
from trueup.simulation.one_step import OneStep, log_softmax

ALL = pytest.mark.parametrize("preset", PRESETS)


def problem(sigma=0.5, size=20):
    generator = torch.Generator().manual_seed(3)
    logits, reward = torch.randn(2, size, generator=generator)
    behaviour = logits + sigma * torch.randn(size, generator=generator)
    return OneStep(target=log_softmax(logits), behaviour=log_softmax(behaviour), reward=reward)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_golden_estimate():
    # Two episodes of one token, π = 1/2, 1/4, 1/4: A = ±1, ρ = 1/2, 3 (capped at 2) of tokens 0, 2.
    # ½·[½·(½, −¼, −¼) − 2·(−½, −¼, ¾)]
    policy = torch.tensor([0.5, 0.25, 0.25]).log()
    token = torch.tensor([[[0], [2]]])
    draws = Draws(
        context=torch.zeros_like(token),
        token=token,
        target=policy[token],
        behaviour=torch.tensor([[[1.0], [1 / 12]]]).log(),
        reward=torch.tensor([[2.0, 0.0]]),
    )
    method = Method(preset=find("tis"), params={"cap": 2.0})
    assert coefficients(draws, method).flatten().tolist() == pytest.approx([0.5, -2.0])
    assert estimates(draws, policy[None], method)[0, 0].tolist() == pytest.approx(
        [0.625, 0.1875, -0.8125]
    )


def test_golden_error():
    # Estimates (1, 0), (3, 0) of (1, 1): mean (2, 0), bias² 2, variance 2, ‖g‖² 2.
    found = error_of(torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]]]), torch.tensor([[1.0, 1.0]]))
    assert found == EstimateError(bias2=1.0, variance=1.0, repeats=2)
    assert found.noise == 0.5
    assert found.mean_squared == 2.0


@ALL
def test_repeats_do_not_see_each_other(preset):
    draws = race(5, slower=(0.5, 0.2), noise=0.5).draw(6, 8, generator())
    method = METHODS[preset]
    together = coefficients(draws, method)
    for i in range(len(draws)):
        alone = coefficients(draws[i : i + 1], method)
        assert torch.allclose(together[i], alone[0], rtol=1e-5, atol=1e-7)


@ALL
def test_without_a_gap_every_estimate_is_the_uncorrected_one(preset):
    this = problem(sigma=0.0)
    draws = this.draw(20, 16, generator())
    plain = estimates(draws, this.policy, METHODS["none"])
    assert torch.equal(estimates(draws, this.policy, METHODS[preset]), plain)


def test_without_a_gap_there_is_no_bias_but_that_of_the_baseline():
    # A mean that holds the episode itself shrinks the estimate by 1 − 1/N.
    this, n, repeats = problem(sigma=0.0), 16, 4000
    found = estimates(this.draw(repeats, n, generator()), this.policy, METHODS["none"])
    off = (found.mean(0) - (1 - 1 / n) * this.gradient).square().sum()
    # The squared error of a mean is at most this often above 16 times its expectation: P(z² > 16),
    # if all variance lay in one direction, one in 16 000.
    assert off < 16 * found.var(0).sum() / repeats


def test_the_whole_ratio_has_no_bias_but_that_of_the_baseline():
    this, n, repeats = problem(sigma=0.5), 16, 4000
    found = estimates(this.draw(repeats, n, generator()), this.policy, METHODS["is"])
    off = (found.mean(0) - (1 - 1 / n) * this.gradient).square().sum()
    # One in 16 000, as above.
    assert off < 16 * found.var(0).sum() / repeats


def test_truncation_far_away_is_the_whole_ratio():
    this = problem(sigma=1.0)
    draws = this.draw(50, 16, generator())
    most = float((this.target - this.behaviour).exp().max())
    near = Method(preset=find("tis"), params={"cap": 1.01 * most})
    far = METHODS["is"]
    assert torch.equal(coefficients(draws, near), coefficients(draws, far))
    tight = Method(preset=find("tis"), params={"cap": 0.9 * most})
    assert not torch.equal(coefficients(draws, tight), coefficients(draws, far))


def test_sampled_bias_of_long_episodes_is_the_exact_one():
    this, n, repeats = race(20, slower=(0.6, 0.0), noise=0.2), 16, 400
    draws = this.draw(repeats, n, generator())
    pi, mu = this.policy, this.behaviour
    for method, choice in ((METHODS["none"], mu), (METHODS["is"], pi)):
        found = estimates(draws, this.policy, method)
        exact = (1 - 1 / n) * this.expected(prefix=mu, choice=choice, suffix=mu)
        # One in 16 000 each, as above.
        assert (found.mean(0) - exact).square().sum() < 16 * found.var(0).sum() / repeats


def test_a_mixed_estimate_has_a_bounded_second_moment():
    # Proposition 2 of the AIS paper: E‖ĝ‖² ≤ (1 + α(C − 1))²·M_A²·M_s², whatever α is.
    this = problem(sigma=2.0)
    draws = this.draw(40, 16, generator())
    cap = PRESETS["ais"].constants["cap"].default
    found = estimates(draws, this.policy, METHODS["ais"])
    score = torch.eye(20) - this.target.exp()
    spread = float(this.reward.max() - this.reward.min())
    bound = (cap * spread) ** 2 * float(score.square().sum(-1).max())
    assert float(found.square().sum((1, 2)).max()) <= bound


def test_methods_share_episodes_and_batch_scoped_ones_may_take_fewer():
    this = problem()
    draws = [this.draw(10, 8, generator(i)) for i in range(3)]
    methods = {name: METHODS[name] for name in ("none", "ais")}
    found = compare(draws, this, methods, batch_repeats=12)
    assert {name: error.repeats for name, error in found.items()} == {"none": 30, "ais": 12}
    joined = torch.cat([estimates(d, this.policy, METHODS["none"]) for d in draws])
    assert found["none"] == error_of(joined, this.gradient)


def test_pieces_hold_all_repeats_and_no_more_tokens_than_fit():
    assert chunk_sizes(5, 1 << 19) == [2, 2, 1]
    assert chunk_sizes(2, 1 << 30) == [1, 1]
