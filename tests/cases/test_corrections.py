"""Failures of the field in corrections and statistics: input and right outcome, by number.

C4, C16 and C17 (NaN, an appended end token with log-prob 0, tool tokens with log-prob 0, all at
positions that are no action tokens) cannot be written down here: a `PolicyGap` holds action tokens
only, so there is no such position for a statistic to meet. `test_c04_c16_c17_...` pins that.
"""

import math
from dataclasses import fields, replace

import pytest
import torch

from support.gaps import make_gap, ratio_gap
from trueup import config
from trueup.corrections.compose import correct
from trueup.corrections.levels import GEOMETRIC
from trueup.corrections.masked import inside
from trueup.corrections.table import PRESETS, find
from trueup.corrections.truncated import truncated
from trueup.diagnostics.effective_size import effective_size, ess_ratio
from trueup.diagnostics.health import health
from trueup.diagnostics.metrics import Metric, metric_of
from trueup.diagnostics.mismatch import mismatch
from trueup.diagnostics.numerics import quantile
from trueup.diagnostics.retention import retention
from trueup.diagnostics.sketch import RELATIVE_ERROR, QuantileSketch
from trueup.errors import ConfigError, DataError
from trueup.gap import PolicyGap
from trueup.losses.policy import policy_loss
from trueup.losses.reduce import token_sum
from trueup.recipes import table

NAN = math.nan


def failed(correction, **kwargs):
    verdicts = health(correction.metrics, **{"corrects": True} | kwargs)
    return {v.name for v in verdicts if not v.ok}


@pytest.mark.parametrize(
    ("preset", "ratios", "kept"),
    [("geo", (0.368, 1.649), (False, True)), ("seq-mis", (0.0498, 4.48), (False, False))],
)
def test_c01_a_rejected_episode_leaves_the_baseline(preset, ratios, kept):
    gap = make_gap([[-2.0] * 3] * 2, [[-1.0] * 3, [-2.5] * 3], rewards=[100, 1])
    of_episode = PRESETS[preset].level.log_ratio(gap).exp()[[0, 3]]
    assert of_episode.tolist() == pytest.approx(ratios, rel=2e-3)
    assert inside(of_episode.log(), low=0.5, high=2.0).tolist() == list(kept)
    made = correct(gap, preset=preset, params={"low": 0.5, "high": 2.0}, advantage="group")
    # What is left is a group of one or none: no contrast, nothing to learn, never −49.5.
    assert made.advantages.tolist() == [0.0] * 6
    assert not made.keep.any()
    assert made.metrics["excluded/filtered_episodes"].sum == kept.count(False)
    assert made.metrics["group/no_contrast"].sum == (1 if any(kept) else 0)


def test_c02_a_token_filter_never_removes_reward():
    # The second episode's only token is outside the band; its reward stays in the baseline.
    gap = ratio_gap([[0.0, 0.1], [3.0]], rewards=[0, 1])
    made = correct(gap, preset="mis", advantage="group")
    plain = correct(gap, preset="none", advantage="group")
    assert made.advantages.tolist() == plain.advantages.tolist() == [-0.5, -0.5, 0.5]
    assert made.keep.tolist() == [True, True, False]
    assert made.weight[2] == 0


def test_c03_an_episode_without_action_token_leaves_its_peers_alone():
    with_empty = correct(
        ratio_gap([[0.1], [], [0.2]], rewards=[0, 50, 1]), preset="tis", advantage="group"
    )
    without = correct(ratio_gap([[0.1], [0.2]], rewards=[0, 1]), preset="tis", advantage="group")
    assert with_empty.advantages.tolist() == without.advantages.tolist() == [-0.5, 0.5]
    assert with_empty.metrics["excluded/empty_episodes"].sum == 1
    assert with_empty.metrics["excluded/garbage_episodes"].sum == 0
    assert with_empty.denominator == 2


def test_c04_c16_c17_no_field_has_room_for_a_token_that_is_not_an_action():
    gap = ratio_gap([[0.1, 0.2], [0.3]])
    sizes = {
        len(value)
        for item in fields(PolicyGap)
        if isinstance(value := getattr(gap, item.name), torch.Tensor)
    }
    assert sizes == {gap.num_tokens, gap.num_episodes, gap.num_episodes + 1}
    for name in ("logp_target", "logp_behaviour"):
        with pytest.raises(DataError, match=name):
            replace(gap, **{name: torch.zeros(2, 4)})  # padded


def test_c05_everything_rejected_is_a_verdict_and_no_exception():
    made = correct(ratio_gap([[3.0, 3.0], [3.0]]), preset="mis", params={"low": 0.5, "high": 5.0})
    assert not made.keep.any()
    assert made.metrics["ess/applied_tokens"].mean == 0
    assert made.metrics["ess/applied_episodes"].mean == 0
    assert "something_kept" in failed(made)
    loss = token_sum(torch.full((3,), NAN), made.keep, denominator=made.denominator)
    assert loss == 0


def test_c06_bounds_are_in_ratio_space_and_may_be_asymmetric():
    d = torch.tensor([4.0, 0.3, 0.5, 5.0]).log()
    assert inside(d, low=0.5, high=5.0).tolist() == [True, False, True, True]


@pytest.mark.parametrize(("kind", "expected"), [("kept", 1.0), ("all", 0.6)])
@pytest.mark.parametrize("bypass", [False, True])
def test_c07_the_denominator_is_a_choice_and_the_same_in_every_mode(kind, expected, bypass):
    # 60 ratios of 1, 40 of e^3 outside the band; a loss of 1 per token.
    gap = ratio_gap([[0.0] * 60, [3.0] * 40])
    made = correct(gap, preset="mis", denominator=kind)
    logp = gap.logp_behaviour if bypass else gap.logp_target
    terms = policy_loss(
        logp,
        logp_old=logp,
        advantage=torch.full((100,), -1.0),
        weight=torch.ones(100),
        keep=made.keep,
        clip_low=0.2,
        clip_high=0.2,
    )
    loss = token_sum(terms.per_token, made.keep, denominator=made.denominator)
    assert float(loss) == pytest.approx(expected)


def test_c08_equal_tiny_weights_have_effective_size_one():
    found = effective_size(ratio_gap([[-18.0] * 5, [-18.0] * 5]))
    assert (found.tokens, found.episodes) == (1.0, 1.0)
    assert effective_size(ratio_gap([[-18.0] * 900] * 2)).episodes == 1.0  # product e^-16200


def test_c09_an_episode_is_one_sample_however_long():
    gap = ratio_gap([[math.log(2)], [math.log(0.01) / 999] * 999])
    # (2 + .01)² / (2 · (4 + .0001)) = 4.0401 / 8.0002
    assert effective_size(gap).episodes == pytest.approx(0.5050, abs=1e-4)


def test_c10_an_empty_row_changes_no_metric():
    rows = [[0.1, -0.2], [0.3], [-0.4]]
    three = correct(ratio_gap(rows, rewards=[0, 1, 2]), preset="tis").metrics
    four = correct(ratio_gap([*rows, []], rewards=[0, 1, 2, 9]), preset="tis").metrics
    # Counted, as 3 episodes without and 1 with.
    assert three["excluded/empty_episodes"].sum == 0
    assert four["excluded/empty_episodes"].sum == 1
    of_tokens = [k for k in three if not k.startswith("excluded/")]
    assert {k: three[k] for k in of_tokens} == {k: four[k] for k in of_tokens}


@pytest.mark.parametrize(("target", "behaviour"), [(-1.0, -100.0), (-100.0, -1.0)])
def test_c11_an_extreme_ratio_is_bounded_and_recorded_raw(target, behaviour):
    gap = make_gap([[-1.0, target], [-1.0]], [[-1.0, behaviour], [-1.0]])
    made = correct(gap, preset="tis", advantage="group")
    d = target - behaviour
    extreme = made.metrics["gap/log_ratio"]
    assert (extreme.max if d > 0 else extreme.min) == d  # ±99, not ±20
    assert 0 <= made.weight[1] <= 2
    logp = gap.logp_target.clone().requires_grad_()
    loss = token_sum(
        policy_loss(
            logp,
            logp_old=gap.logp_behaviour,  # bypass: the extreme ratio is inside the clip
            advantage=made.advantages,
            weight=torch.ones(3),
            keep=made.keep,
            clip_low=0.2,
            clip_high=0.2,
        ).per_token,
        made.keep,
        denominator=made.denominator,
    )
    loss.backward()
    assert loss.isfinite()
    assert logp.grad.isfinite().all()


def test_c12_a_missing_log_prob_is_excluded_and_a_missing_row_rejects_the_episode():
    one = correct(ratio_gap([[0.1, NAN], [0.2]], rewards=[0, 1]), preset="tis", advantage="group")
    assert one.keep.tolist() == [True, False, True]
    assert one.metrics["excluded/missing_logp"].sum == 1
    assert one.metrics["weight/raw"].count == 2
    assert one.advantages.tolist() == [-0.5, -0.5, 0.5]

    row = correct(
        ratio_gap([[0.1], [0.2], [NAN, NAN]], rewards=[0, 1, 9]), preset="tis", advantage="group"
    )
    assert row.keep.tolist() == [True, True, False, False]
    assert row.advantages.tolist() == [-0.5, 0.5, 0, 0]  # 9 is in nobody's baseline
    assert row.metrics["excluded/garbage_episodes"].sum == 1
    assert "missing_logp" in failed(row)


def test_c15_equal_policies_give_statistics_without_spread():
    made = correct(ratio_gap([[0.0] * 3, [0.0] * 7]), preset="tis")
    raw = made.metrics["weight/raw"]
    assert (raw.min, raw.max, raw.mean, raw.count) == (1, 1, 1, 10)
    assert made.metrics["ess/raw_tokens"].mean == made.metrics["ess/applied_episodes"].mean == 1


def test_c18_a_product_filter_rejects_by_length_and_health_says_so():
    """60 episodes per length: each share within 4 standard errors (.26) of the true one."""
    gen = torch.Generator().manual_seed(0)
    lengths = [100, 1000, 5000, 20000]
    rows = [0.05 * torch.randn(n, generator=gen) for n in lengths for _ in range(60)]
    counts = torch.tensor([len(row) for row in rows])
    n, e = int(counts.sum()), len(rows)
    zeros = torch.zeros(n, dtype=torch.int64)
    gap = PolicyGap(
        logp_target=torch.full((n,), -1.0),
        logp_behaviour=-1.0 - torch.cat(rows),
        segment_offsets=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        segment_episode=torch.arange(e),
        group=torch.arange(e) % 4,
        reward=torch.arange(e, dtype=torch.float32) // 4 % 2,
        version=zeros,
        lag=zeros,
        engine=zeros,
    )
    bounds = {"low": 0.0, "high": 3.0}
    product = correct(gap, preset="seq-mis", params=bounds)
    shares = [g.kept_episodes for g in retention(gap, keep=product.keep).by_length]
    assert shares == pytest.approx([0.986, 0.756, 0.622, 0.562], abs=0.26)
    verdicts = {v.name: v for v in health(product.metrics, corrects=True)}
    assert not verdicts["length_bias"].ok
    assert verdicts["length_bias"].value == pytest.approx(0.562 / 0.986, abs=0.26)
    assert "geometric mean or token level" in verdicts["length_bias"].message
    geometric = correct(gap, preset="geo", params=bounds)
    assert bool(geometric.keep.all())
    assert "length_bias" not in failed(geometric)


def test_c19_small_weights_are_not_raised():
    d = torch.tensor([0.05, 0.2, 0.9, 1, 3, 8]).log()
    assert truncated(d, cap=5.0).tolist() == pytest.approx([0.05, 0.2, 0.9, 1, 3, 5])


@pytest.mark.parametrize(
    ("preset", "params", "applied_max"),
    [("tis", {"cap": 3.0}, 3.0), ("mis", {"high": 3.0}, 1.0)],
)
def test_c20_raw_and_applied_extremes_are_both_logged(preset, params, applied_max):
    gap = ratio_gap([[math.log(50), 0.0], [0.0, 0.0]])
    metrics = correct(gap, preset=preset, params=params).metrics
    assert metrics["weight/raw"].max == pytest.approx(50)
    assert metrics["weight/applied"].max == applied_max
    assert metrics["weight/over_cap"].mean == 0.25


def test_c21_shares_merge_as_sums_and_counts_and_extremes_as_extremes():
    quarter = Metric(sum=3, count=10, min=0, max=1)
    total = quarter.merge(quarter).merge(quarter).merge(quarter)
    assert total.mean == pytest.approx(0.3)
    first, *others = [metric_of(torch.tensor([x])) for x in (0.1, 0.9, 0.2, 0.3)]
    for other in others:
        first = first.merge(other)
    assert first.max == pytest.approx(0.9)


def test_c22_bfloat16_log_probs_are_refused_and_float32_keeps_the_difference():
    gap = make_gap([[-12.34], [-1.0]], [[-12.31], [-1.0]])
    assert float(gap.log_ratio[0]) == pytest.approx(-0.03, abs=1e-6)
    with pytest.raises(DataError, match="logp_target must be of dtype"):
        replace(gap, logp_target=gap.logp_target.bfloat16())


def test_c23_an_asynchronous_run_is_uncorrected_only_where_that_is_written_out():
    # No default, recipe or omission ends there: `none` must be a word of the user's.
    assert config.load("", ["schedule.staleness=4"]).correction.preset == "tis"
    for name in table.names():
        chosen = config.load(table.text(name))
        if chosen.staleness_bound and chosen.correction.preset == "none":
            assert 'preset = "none"' in table.text(name)
    assert config.load("", ["correction.preset=none"]).correction.preset == "none"
    for nothing in ("", "off", "null"):
        with pytest.raises(ConfigError, match=r"correction\.preset must be one of none"):
            find(nothing)


def test_c24_a_correction_that_is_never_applied_fails_the_health_check():
    gap = make_gap([[-1.0, -2.0], [-1.5]], [[-1.1, -1.9], [-1.6]])
    idle, active = correct(gap, preset="none"), correct(gap, preset="tis")
    assert "correction_active" in failed(idle)
    assert "correction_active" not in failed(idle, corrects=False)
    assert "correction_active" not in failed(active)


def test_c25_later_iterations_move_r_and_never_w():
    gap = ratio_gap([[0.5], [-0.5]], rewards=[1, 0])
    made = correct(gap, preset="tis", advantage="group")
    weight = made.weight.clone()
    for shift in (0.0, 0.1):  # π_θ after each optimiser step
        terms = policy_loss(
            gap.logp_target + shift,
            logp_old=gap.logp_target,
            advantage=made.advantages,
            weight=made.weight,
            keep=made.keep,
            clip_low=0.2,
            clip_high=0.2,
        )
        expected = -weight * math.exp(shift) * torch.tensor([0.5, -0.5])
        torch.testing.assert_close(terms.per_token, expected)
    assert torch.equal(made.weight, weight)


def test_c26_a_missing_token_is_left_out_of_the_geometric_mean():
    # Nine tokens of .1 and one unknown: the mean is .1, neither .09 nor a floor's log / 10.
    gap = ratio_gap([[0.1] * 9 + [NAN], [0.1]])
    assert GEOMETRIC.log_ratio(gap).tolist() == pytest.approx([0.1] * 11)


def test_c26_a_zeroed_token_is_left_out_of_a_product():
    gap = ratio_gap([[0.1] * 10, [0.1] * 9])
    keep = torch.tensor([True] * 9 + [False] + [True] * 9)
    weight = torch.where(keep, gap.log_ratio.exp(), 0.0)
    # Both episodes are then the product of nine equal weights.
    assert effective_size(gap, weight=weight, keep=keep).episodes == pytest.approx(1.0)
    assert ess_ratio(torch.tensor([0.9, -torch.inf])) == pytest.approx(0.5)


def test_c27_quantiles_exist_above_2_to_the_24_elements():
    n = 2**24 + 1
    ordered = torch.arange(n, dtype=torch.float64)
    assert [int(quantile(ordered, q)) for q in (0.5, 1.0)] == [2**23, 2**24]


def test_c27_the_sketch_exists_above_2_to_the_24_elements():
    n = 2**24 + 1
    found = QuantileSketch.of(torch.arange(n, dtype=torch.float32))
    assert (found.count, found.quantile(1.0)) == (n, 2**24)
    assert found.quantile(0.5) == pytest.approx(2**23, rel=RELATIVE_ERROR)


@pytest.mark.slow  # 2 GB
def test_c27_mismatch_exists_above_2_to_the_24_tokens():
    n = 2**24 + 1
    behaviour = torch.arange(n, dtype=torch.float32) / -(n - 1)
    zeros = torch.zeros(n, dtype=torch.int64)
    found = mismatch(
        PolicyGap(
            logp_target=torch.zeros(n),
            logp_behaviour=behaviour,
            segment_offsets=torch.tensor([0, n]),
            segment_episode=zeros[:1],
            group=zeros[:1],
            reward=torch.zeros(1),
            version=zeros,
            lag=zeros,
            engine=zeros,
        )
    )
    assert found.abs_median == pytest.approx(0.5, rel=RELATIVE_ERROR)
    assert found.abs_p99 == pytest.approx(0.99, rel=RELATIVE_ERROR)
    assert found.abs_max == 1.0
