"""Relations between losses: where two methods are one, they are equal here."""

import pytest
import torch

from trueup.config import CLIPS, TrainConfig
from trueup.losses.policy import policy_loss
from trueup.losses.reduce import aggregation, token_sum
from trueup.losses.table import LOSSES

ALL = pytest.mark.parametrize("name", LOSSES)
N = 12
SEQUENCE = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2])


def problem(spread=0.5, seed=0):
    gen = torch.Generator().manual_seed(seed)
    old = -2 + torch.randn(N, generator=gen)
    new = old + spread * torch.randn(N, generator=gen)
    return {
        "logp": new.requires_grad_(),
        "logp_old": old,
        "advantage": torch.randn(3, generator=gen)[SEQUENCE],
        "weight": torch.rand(N, generator=gen) * 2,
        "keep": torch.rand(N, generator=gen) > 0.2,
    }


def terms(name, values, **settings):
    train = TrainConfig(loss=name, **settings)
    return LOSSES[name].terms(train, **values, sequence=SEQUENCE)


def gradient(loss, values):
    (found,) = torch.autograd.grad(loss.per_token.sum(), values["logp"])
    return found


def test_the_table_the_configuration_and_the_published_bounds_name_the_same_losses():
    named = TrainConfig.model_json_schema()["properties"]["loss"]["enum"]
    assert set(named) == set(LOSSES) == set(CLIPS)
    for name, (low, high) in CLIPS.items():
        settings = TrainConfig(loss=name)
        assert (settings.clip_low, settings.clip_high) == (low, high)


@ALL
def test_at_the_start_of_an_update_every_loss_is_the_policy_gradient(name):
    values = problem(spread=0.0)
    keep, weight, advantage = values["keep"], values["weight"], values["advantage"]
    expected = torch.where(keep, -weight * advantage, 0.0)
    torch.testing.assert_close(gradient(terms(name, values), values), expected)


@ALL
def test_a_weight_is_an_advantage_per_token(name):
    values = problem()
    folded = {**values, "advantage": values["advantage"] * values["weight"]}
    folded["weight"] = torch.ones(N)
    first, second = terms(name, values), terms(name, folded)
    torch.testing.assert_close(first.per_token, second.per_token)
    torch.testing.assert_close(gradient(first, values), gradient(second, folded))


@ALL
def test_a_token_that_is_not_kept_has_no_term(name):
    values = problem()
    found = terms(name, values)
    assert (found.per_token[~values["keep"]] == 0).all()
    assert (gradient(found, values)[~values["keep"]] == 0).all()


def test_grpo_is_dapo_with_equal_bounds_and_a_mean_over_sequences():
    """Written out with its clip symmetric, against the general form."""
    values = {**problem(), "weight": torch.ones(N), "keep": torch.ones(N, dtype=torch.bool)}
    found = terms("ppo", values, clip_low=0.2, clip_high=0.2)
    share = aggregation(
        "sequence_mean",
        counted=values["keep"],
        episode=SEQUENCE,
        num_episodes=3,
        constant=1.0,
    )
    ours = token_sum(found.per_token * share.share, values["keep"], denominator=share.denominator)
    ratio = (values["logp"] - values["logp_old"]).exp()
    gain = torch.minimum(ratio * values["advantage"], ratio.clamp(0.8, 1.2) * values["advantage"])
    grpo = -torch.stack([gain[s == SEQUENCE].mean() for s in range(3)]).mean()
    assert float(ours.detach()) == pytest.approx(float(grpo.detach()), rel=1e-6)


def test_gspo_over_sequences_of_one_token_is_ppo():
    values = problem()
    settings = TrainConfig(loss="gspo", clip_low=0.2, clip_high=0.28)
    alone = LOSSES["gspo"].terms(settings, **values, sequence=torch.arange(N))
    token = terms("ppo", values)
    torch.testing.assert_close(alone.per_token, token.per_token)
    torch.testing.assert_close(gradient(alone, values), gradient(token, values))


def test_cispo_and_ppo_agree_where_no_bound_binds():
    values = problem()
    wide = {"clip_low": 1.0, "clip_high": 1e6}
    cispo, ppo = (gradient(terms(name, values, **wide), values) for name in ("cispo", "ppo"))
    torch.testing.assert_close(cispo, ppo)


def test_bypass_is_the_decoupled_loss_of_a_step_whose_target_is_the_behaviour():
    """C7: π_θ/μ inside the clip and no weight; the two-policy loss never has both."""
    values = problem()
    behaviour = values["logp_old"] + 0.1
    bypass = {**values, "logp_old": behaviour, "weight": torch.ones(N)}
    ratio = (values["logp"] - behaviour).exp().detach()
    inside = values["keep"] & (ratio > 0.8) & (ratio < 1.28)
    grad = gradient(terms("ppo", bypass), bypass)
    torch.testing.assert_close(grad[inside], (-ratio * values["advantage"])[inside])


@pytest.mark.parametrize(("advantage", "term", "slope"), [(-1.0, 3.0, 0.0), (1.0, -1.28, 0.0)])
def test_dual_clip_bounds_a_large_ratio_on_both_sides(advantage, term, slope):
    """r = 7.4: the minimum is −7.4 for A = −1, bounded by c A = −3."""
    logp = torch.tensor([2.0], requires_grad=True)
    found = policy_loss(
        logp,
        logp_old=torch.zeros(1),
        advantage=torch.tensor([advantage]),
        weight=torch.ones(1),
        keep=torch.tensor([True]),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
    ).per_token
    found.sum().backward()
    assert found.item() == pytest.approx(term)
    assert logp.grad.item() == slope


def test_dual_clip_changes_nothing_below_its_bound():
    values = problem()
    plain, dual = terms("ppo", values), terms("ppo", values, dual_clip=50.0)
    assert torch.equal(plain.per_token, dual.per_token)
