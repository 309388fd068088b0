import pytest
import torch

from trueup.errors import ConfigError
from trueup.simulation.estimator import divergence
from trueup.simulation.one_step import OneStep, flatter, less_trained, log_softmax

LOGITS = torch.tensor([1.0, -0.5, 0.3, 2.0])
REWARD = torch.tensor([0.0, 1.0, -1.0, 2.0])


def test_the_gradient_is_that_of_the_expected_reward():
    logits = LOGITS.clone().requires_grad_()
    (logits.softmax(-1) * REWARD).sum().backward()
    this = OneStep(target=log_softmax(LOGITS), behaviour=log_softmax(LOGITS), reward=REWARD)
    assert torch.allclose(this.gradient[0], logits.grad)


@pytest.mark.parametrize("kl", [0.008, 0.1, 0.4])
def test_a_stale_sampler_is_as_far_away_as_asked(kl):
    target = log_softmax(LOGITS)
    for behaviour in (flatter(target, kl), less_trained(target, REWARD, kl)):
        assert divergence(behaviour, target) == pytest.approx(kl, rel=1e-4)
        assert float(behaviour.exp().sum()) == pytest.approx(1, abs=1e-6)


def test_a_stale_sampler_is_flatter_or_earns_less():
    target = log_softmax(LOGITS)

    def entropy(logp):
        return -float((logp.exp() * logp).sum())

    assert entropy(flatter(target, 0.1)) > entropy(target)
    earned = (less_trained(target, REWARD, 0.1).exp() * REWARD).sum()
    assert earned < (target.exp() * REWARD).sum() - 0.1


def test_a_divergence_that_the_path_does_not_reach_is_refused():
    with pytest.raises(ConfigError, match=r"kl must be <= .* on this path, got 50"):
        flatter(log_softmax(LOGITS), 50.0)


def test_samples_are_episodes_of_one_token():
    behaviour = log_softmax(torch.tensor([0.0, -torch.inf, 0.0, 0.0]).clamp(min=-60))
    this = OneStep(target=log_softmax(LOGITS), behaviour=behaviour, reward=REWARD)
    draws = this.draw(3, 5, torch.Generator().manual_seed(0))
    assert draws.token.shape == (3, 5, 1)
    assert (draws.token != 1).all()
    assert torch.equal(draws.reward, REWARD[draws.token[..., 0]])
    assert torch.equal(draws.behaviour, behaviour[draws.token])
