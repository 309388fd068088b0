"""What every correction preset must satisfy, whatever it computes."""

import math

import pytest
import torch

from support.gaps import make_gap
from trueup.corrections.compose import correct
from trueup.corrections.table import PRESETS
from trueup.diagnostics.metrics import METRICS
from trueup.losses.advantages import group_advantages

LENGTHS = (3, 1, 4, 2, 5, 2, 1, 6)
GROUPS = (0, 0, 0, 0, 7, 7, 7, 7)
REWARDS = (0.0, 1.0, 0.5, 1.0, 2.0, 0.0, 0.0, 1.0)
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
    )


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
    bounds = PRESETS[preset].constants
    assert float(made.weight.max()) <= max([1.0, *(c.default for c in bounds.values())])


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
    if PRESETS[preset].scope == "batch":  # its weights are a property of the whole
        skipped.add("weight/applied")
    assert set(whole) == set(left) == set(right)
    for name in set(whole) - skipped:
        merged, expected = left[name].merge(right[name]), whole[name]
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
