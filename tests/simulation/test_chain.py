import itertools

import pytest
import torch

from trueup.simulation.chain import race

LENGTHS = (1, 10, 100, 1000)


def chain(length, tokens=8, slower=(0.2, 0.0)):
    return race(length, slower=slower, noise=0.05, tokens=tokens)


def walk(tokens, movers):
    """Contexts and reward of a sequence, from the definition."""
    contexts, counter = [], 0
    for t, token in enumerate(tokens):
        contexts.append(int(2 * counter >= t))
        counter += token < movers
    return contexts, float(2 * counter >= len(tokens))


def every_sequence(length):
    """(contexts, tokens, reward) of all sequences over two moving and two staying tokens."""
    for tokens in itertools.product(range(4), repeat=length):
        contexts, reward = walk(tokens, 2)
        yield torch.tensor(contexts), torch.tensor(tokens), reward


def test_golden_one_token():
    # From counter 0 the policy is on pace; the one token must move: ∂P/∂z_v = π_v(1[moves] − 1/2).
    this = chain(1, slower=(9.0, 0.1))
    expected = this.policy[1].exp() * torch.tensor([0.5] * 4 + [-0.5] * 4)
    assert torch.allclose(this.gradient[1], expected)
    assert (this.gradient[0] == 0).all()
    assert this.pass_rate == pytest.approx((0.5, 1 / (1 + 2.718281828**0.1)), abs=1e-6)


def test_the_gradient_is_that_of_the_enumerated_probability_to_pass():
    this = chain(5, tokens=4)
    logits = this.policy.double().clone().requires_grad_()
    logp = logits.log_softmax(-1)
    passing = sum(logp[c, v].sum().exp() * r for c, v, r in every_sequence(5))
    passing.backward()
    assert float(passing.detach()) == pytest.approx(this.pass_rate[0])
    assert torch.allclose(this.gradient.double(), logits.grad, atol=1e-6)


def enumerated(this, *, before, itself, after):
    """Expectation of the estimator whose weights hold the named ratios, over all sequences."""
    total = torch.zeros(2, 4, dtype=torch.float64)
    pi, mu = this.policy.double(), this.behaviour.double()
    for c, v, reward in every_sequence(this.length):
        ratio = pi[c, v] - mu[c, v]
        for t in range(this.length):
            d = before * ratio[:t].sum() + itself * ratio[t] + after * ratio[t + 1 :].sum()
            score = -pi[c[t]].exp()
            score[v[t]] += 1
            chance = (mu[c, v].sum() + d).exp()
            total[c[t]] += chance * (reward - this.pass_rate[1]) * score
    return total.float()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_expectations_are_those_of_all_sequences(before, itself, after):
    this = chain(4, tokens=4)
    of = {False: this.behaviour, True: this.policy}
    found = this.expected(prefix=of[before], choice=of[itself], suffix=of[after])
    expected = enumerated(this, before=before, itself=itself, after=after)
    assert torch.allclose(found, expected, atol=1e-6)


def test_the_second_moment_of_products_is_that_of_all_sequences():
    this = chain(5, tokens=4)
    pi, mu = this.policy.double(), this.behaviour.double()
    terms = [(2 * pi[c, v] - mu[c, v]).sum().exp() for c, v, _ in every_sequence(5)]
    assert this.product_second_moment == pytest.approx(float(sum(terms)))


def relative(this, found):
    return float((found - this.gradient).square().sum() / this.gradient.square().sum())


def test_the_bias_of_token_weights_grows_with_length_and_so_does_the_cost_of_products():
    token, prefix, moment = [], [], []
    for length in LENGTHS:
        this = chain(length)
        pi, mu = this.policy, this.behaviour
        token.append(relative(this, this.expected(prefix=mu, choice=pi, suffix=mu)))
        prefix.append(relative(this, this.expected(prefix=mu, choice=pi, suffix=pi)))
        moment.append(this.product_second_moment)
        assert relative(this, this.expected(prefix=pi, choice=pi, suffix=pi)) == 0
    # A single token has nothing before or after it.
    assert token[0] == pytest.approx(0, abs=1e-12)
    assert prefix == sorted(prefix)
    assert token == sorted(token)
    assert moment == sorted(moment)
    assert token[-1] == pytest.approx(0.3876, abs=1e-3)
    assert moment[-1] > 500


def test_episodes_are_walks_of_the_behaviour_policy():
    this = chain(6)
    draws = this.draw(2, 50, torch.Generator().manual_seed(0))
    episodes = (draws.context.flatten(0, 1), draws.token.flatten(0, 1), draws.reward.flatten())
    for context, token, reward in zip(*episodes, strict=True):
        assert (context.tolist(), float(reward)) == walk(token.tolist(), 4)
    assert torch.equal(draws.target, this.policy[draws.context, draws.token])
    assert torch.equal(draws.behaviour, this.behaviour[draws.context, draws.token])


def test_tokens_are_as_frequent_as_the_behaviour_policy_says():
    this = chain(1)
    token = this.draw(100, 1000, torch.Generator().manual_seed(0)).token.flatten()
    share = token.bincount(minlength=8) / len(token)
    chance = this.behaviour[1].exp()
    # Eight binomial counts within 5 standard errors: a false alarm in 200 000.
    assert ((share - chance).abs() < 5 * (chance * (1 - chance) / len(token)).sqrt()).all()
