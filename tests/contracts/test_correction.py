"""What every correction preset must satisfy, whatever it computes."""

import math
from dataclasses import fields

import pytest
import torch

from support.gaps import make_gap
from trueup.corrections.compose import correct
from trueup.corrections.table import FILTERS, PRESETS
from trueup.diagnostics.metrics import METRICS, Metric
from trueup.losses.advantages import group_advantages

LENGTHS = (3, 1, 4, 2, 5, 2, 1, 6)
GROUPS = (0, 0, 0, 0, 7, 7, 7, 7)
REWARDS = (0.0, 1.0, 0.5, 1.0, 2.0, 0.0, 0.0, 1.0)
EMPTY = Metric(sum=0, count=0, min=math.inf, max=-math.inf)  # a metric without values is left out
ALL = pytest.mark.parametrize("preset", PRESETS)


def rows(spread, seed=0, offset=0.0):
    gen = torch.Generator().manual_seed(seed)
    return [
        (-2 + offset + spread * torch.randn(n, generator=gen)).clamp(max=-0.01).tolist()
        for n in LENGTHS
    ]


def gap_of(behaviour, order=range(8)):
    target = rows(0.5)
    return make_gap(
        [target[i] for i in order],
        [behaviour[i] for i in order],
        rewards=[REWARDS[i] for i in order],
        groups=[GROUPS[i] for i in order],
        lags=[[i] * LENGTHS[i] for i in order],
        turns=[[t // 2 for t in range(LENGTHS[i])] for i in order],
    )


def disturbed(token, by=1.0):
    """A gap of which one token's log μ is moved; it keeps every filter busy."""
    behaviour = rows(0.5, seed=1)
    episode = 0
    while token >= len(behaviour[episode]):
        token -= len(behaviour[episode])
        episode += 1
    behaviour[episode][token] = min(behaviour[episode][token] + by, -0.001)
    return gap_of(behaviour)


def in_float64(gap):
    """The same gap, twice as wide: no `PolicyGap` is, so its fields are set behind its back."""
    wide = gap_of(rows(0.5))
    for item in fields(gap):
        value = getattr(gap, item.name)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value = value.double()
        object.__setattr__(wide, item.name, value)
    return wide


@ALL
@pytest.mark.parametrize("kind", ["group", "group_std", "leave_one_out"])
def test_without_a_gap_it_is_exactly_the_uncorrected_estimator(preset, kind):
    gap = gap_of(rows(0.5))
    made = correct(gap, preset=preset, advantage=kind)
    plain = group_advantages(
        gap.reward, gap.group, counted=torch.ones(8, dtype=torch.bool), kind=kind
    )
    assert made.keep.all()
    assert torch.equal(made.weight, torch.ones(gap.num_tokens))
    assert torch.equal(made.advantages, plain.value[gap.episode])
    assert made.denominator == gap.num_tokens


@ALL
@pytest.mark.parametrize("bad", [math.nan, -math.inf, -1e4, 0.0])
def test_everything_is_finite_for_any_behaviour_log_prob(preset, bad):
    behaviour = rows(0.5, seed=1)
    behaviour[2] = [bad] * len(behaviour[2])
    behaviour[4][0] = bad
    made = correct(gap_of(behaviour), preset=preset)
    assert made.weight.isfinite().all()
    assert (made.weight >= 0).all()
    assert made.advantages.isfinite().all()
    for metric in made.metrics.values():
        assert all(map(math.isfinite, (metric.sum, metric.count, metric.min, metric.max)))


@ALL
def test_an_enormous_ratio_leaves_every_figure_finite(preset):
    behaviour = rows(0.5, seed=1)
    behaviour[0][0] = -1e4
    made = correct(gap_of(behaviour), preset=preset)
    assert made.metrics["gap/log_ratio"].max > 9e3
    assert float(made.weight.max()) <= PRESETS[preset].bounds(PRESETS[preset].resolve({}))[1]


@ALL
@pytest.mark.parametrize("spread", [0.01, 0.5, 3.0])
def test_weights_of_kept_tokens_stay_within_the_stated_bounds(preset, spread):
    low, high = PRESETS[preset].bounds(PRESETS[preset].resolve({}))
    made = correct(gap_of(rows(spread, seed=2)), preset=preset)
    kept = made.weight[made.keep].double()
    assert (kept >= low * (1 - 1e-6)).all()
    assert (kept <= high * (1 + 1e-6)).all()


@ALL
def test_float32_and_float64_agree_to_rounding(preset):
    # No random ratio here is within rounding of a bound.
    gap = gap_of(rows(0.5, seed=1))
    narrow, wide = correct(gap, preset=preset), correct(in_float64(gap), preset=preset)
    assert torch.equal(narrow.keep, wide.keep)
    torch.testing.assert_close(narrow.weight, wide.weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(narrow.advantages, wide.advantages, rtol=1e-6, atol=1e-7)


@ALL
@pytest.mark.parametrize("token", [0, 6, 20])
def test_what_lies_outside_the_scope_changes_nothing(preset, token):
    before, after = gap_of(rows(0.5, seed=1)), disturbed(token)
    same = {
        "token": torch.arange(before.num_tokens) == token,
        "sequence": before.episode == before.episode[token],
        "group": before.group[before.episode] == before.group[before.episode[token]],
        "batch": torch.ones(before.num_tokens, dtype=torch.bool),
    }[PRESETS[preset].scope]
    first, second = (correct(gap, preset=preset) for gap in (before, after))
    for name in ("keep", "weight", "advantages"):
        assert torch.equal(getattr(first, name)[~same], getattr(second, name)[~same])


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_before_another_presets_weights_rejects_what_it_rejects_alone(name):
    gap = gap_of(rows(0.5, seed=1))
    both = correct(gap, preset="tis", filters={name: {}})
    alone, weights = correct(gap, preset=name), correct(gap, preset="tis")
    assert torch.equal(both.keep, alone.keep & weights.keep)
    assert torch.equal(both.advantages, alone.advantages)
    assert torch.equal(both.weight, torch.where(both.keep, weights.weight, 0.0))


@ALL
def test_results_are_detached_and_of_the_stated_types(preset):
    gap = gap_of(rows(0.5, seed=1))
    gap.logp_target.requires_grad_()
    made = correct(gap, preset=preset)
    for tensor in (made.advantages, made.weight, made.keep):
        assert not tensor.requires_grad
        assert tensor.shape == (gap.num_tokens,)
    assert made.weight.dtype == made.advantages.dtype == torch.float32
    assert made.keep.dtype == torch.bool
    assert (made.weight[~made.keep] == 0).all()


@ALL
def test_reordering_episodes_reorders_the_results(preset):
    order = (5, 0, 7, 2, 1, 6, 3, 4)
    behaviour = rows(0.5, seed=1)
    straight, mixed = gap_of(behaviour), gap_of(behaviour, order)
    first, second = correct(straight, preset=preset), correct(mixed, preset=preset)
    for i, episode in enumerate(order):
        here, there = straight.episode == episode, mixed.episode == i
        assert torch.equal(first.keep[here], second.keep[there])
        torch.testing.assert_close(first.weight[here], second.weight[there], rtol=1e-6, atol=0)
        torch.testing.assert_close(
            first.advantages[here], second.advantages[there], rtol=1e-6, atol=1e-7
        )
    assert first.denominator == second.denominator


@ALL
def test_metrics_of_two_shards_merge_to_those_of_the_whole(preset):
    behaviour = rows(0.5, seed=1)
    behaviour[3][0] = math.nan
    whole = correct(gap_of(behaviour), preset=preset).metrics
    left, right = (
        correct(gap_of(behaviour, part), preset=preset).metrics for part in (range(4), range(4, 8))
    )
    skipped = {name for name, spec in METRICS.items() if spec.reducer == "batch"}
    if PRESETS[preset].scope == "batch":  # what it decides is a property of the whole
        skipped |= {name for name in METRICS if not name.startswith(("gap/", "weight/raw"))}
    assert set(whole) - skipped == (set(left) | set(right)) - skipped
    for name in set(whole) - skipped:
        merged, expected = left.get(name, EMPTY).merge(right.get(name, EMPTY)), whole[name]
        assert (merged.min, merged.max) == (expected.min, expected.max) or name.startswith("group")
        assert merged.sum == pytest.approx(expected.sum, rel=1e-12)
        assert name.startswith("group") or merged.count == expected.count


@ALL
def test_every_metric_is_in_the_table(preset):
    assert set(correct(gap_of(rows(0.5, seed=1)), preset=preset).metrics) <= set(METRICS)


@ALL
def test_a_batch_without_tokens_gives_an_empty_correction(preset):
    made = correct(make_gap([[], []], [[], []]), preset=preset)
    assert made.weight.shape == (0,)
    assert made.denominator == 1
    assert made.metrics["excluded/empty_episodes"].sum == 2


@ALL
def test_a_lag_bound_takes_tokens_out_of_the_loss_and_leaves_the_baseline(preset):
    gap = gap_of(rows(0.5))
    made = correct(gap, preset=preset, advantage="group", max_lag=5)
    assert torch.equal(made.keep, gap.lag <= 5)
    free = correct(gap, preset=preset, advantage="group")
    assert torch.equal(made.advantages, free.advantages)
    assert made.denominator == free.denominator
