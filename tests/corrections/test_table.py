import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from support.gaps import ratio_gap
from trueup.config import CorrectionConfig, TrainConfig
from trueup.corrections.cause import Cause
from trueup.corrections.compose import ZeroVarianceKind, apply, correct
from trueup.corrections.levels import TOKEN
from trueup.corrections.method import widest
from trueup.corrections.preset import Filter
from trueup.corrections.table import ALIASES, FILTERS, PRESETS, explain, find
from trueup.errors import ConfigError
from trueup.losses.advantages import AdvantageKind
from trueup.losses.reduce import DenominatorKind


@pytest.mark.parametrize(
    ("section", "field", "kind"),
    [
        (TrainConfig, "advantage", AdvantageKind),
        (TrainConfig, "zero_variance", ZeroVarianceKind),
        (CorrectionConfig, "denominator", DenominatorKind),
        (CorrectionConfig, "on", Cause),
    ],
)
def test_the_configuration_offers_exactly_the_choices_of_the_code(section, field, kind):
    assert get_args(section.model_fields[field].annotation) == get_args(kind)


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(
        ConfigError, match=r"correction\.preset must be one of .*did you mean 'tis'"
    ):
        correct(ratio_gap([[0.0]]), preset="tiss")
    with pytest.raises(ConfigError, match=r"correction\.preset"):
        explain("vtrace")


@pytest.mark.parametrize(
    ("preset", "params", "message"),
    [
        ("tis", {"cup": 2.0}, r"params\.cup must be one of cap, got 'cup'; did you mean 'cap'"),
        ("none", {"cap": 2.0}, "absent: there are no constants"),
        ("tis", {"cap": 0.0}, r"params\.cap must be > 0, got 0\.0"),
        ("tis", {"cap": math.nan}, r"params\.cap must be > 0, got nan"),
        ("mis", {"low": 6.0}, r"params\.low must be <= 1, got 6\.0"),
        ("mis", {"low": 0.2, "high": 0.1}, r"params\.high must be >= 1, got 0\.1"),
        ("mis", {"low": math.nan}, r"params\.low must be >= 0, got nan"),
        ("ais", {"cap": 0.5}, r"params\.cap must be >= 1, got 0\.5"),
    ],
)
def test_a_wrong_constant_is_refused_with_its_rule(preset, params, message):
    with pytest.raises(ConfigError, match=message):
        correct(ratio_gap([[0.0]]), preset=preset, params=params)


@pytest.mark.parametrize("name", PRESETS)
def test_explain_states_formula_constants_source_and_price(name):
    preset, text = PRESETS[name], explain(name)
    assert preset.formula in text
    assert preset.source in text
    assert "forward" in text
    for key, constant in preset.constants.items():
        assert f"{key} = {constant.default:g}" in text


def test_weights_worked_out_by_hand():
    d = [[math.log(x) for x in (0.3, 1.0, 4.0)], [math.log(8.0)]]
    gap = ratio_gap(d, rewards=[1, 0])
    assert correct(gap, preset="none").weight.tolist() == [1, 1, 1, 1]
    assert correct(gap, preset="tis").weight.tolist() == pytest.approx([0.3, 1, 2, 2])
    assert correct(gap, preset="mis").weight.tolist() == pytest.approx([0, 1, 4, 0])


def test_a_ratio_equal_to_the_cap_is_not_over_it():
    gap = ratio_gap([[math.log(2.0)], [math.log(2.1)]])
    assert correct(gap, preset="tis").metrics["weight/over_cap"].sum == 1


def test_adaptive_weights_are_those_of_the_kept_tokens_alone():
    # The two tokens of the golden example beside a missing log-prob and a group without contrast.
    gap = ratio_gap(
        [[0.0, math.nan], [math.log(3)], [9.0], [-9.0]],
        rewards=[2, 0, 1, 1],
        groups=[0, 0, 1, 1],
    )
    made = correct(gap, preset="ais", advantage="group")
    assert made.weight.tolist() == pytest.approx([1, 0, 1.455521, 0, 0], abs=5e-6)
    assert made.metrics["adaptive/alpha"].mean == pytest.approx(0.227760, abs=3e-6)


def test_zero_variance_groups_leave_the_batch_or_stay_in_it():
    gap = ratio_gap([[0.0], [0.0], [0.1], [0.2]], rewards=[0, 1, 3, 3], groups=[0, 0, 1, 1])
    dropped = correct(gap, preset="none", zero_variance="drop")
    kept = correct(gap, preset="none", zero_variance="keep")
    assert (dropped.keep.tolist(), dropped.denominator) == ([True, True, False, False], 2)
    assert (kept.keep.tolist(), kept.denominator) == ([True] * 4, 4)
    assert kept.advantages.tolist() == dropped.advantages.tolist()
    assert dropped.metrics["group/no_contrast"].sum == 1
    assert dropped.metrics["ess/applied_tokens"].mean == 1  # nothing was rejected


def test_a_signed_filter_sees_the_advantages():
    """How a method that reads the sign is added: a filter and a preset."""
    signed = replace(
        PRESETS["tis"],
        filter=Filter(
            level=TOKEN,
            signed=True,
            keep=lambda ratios, constants: (ratios.advantage > 0) | (ratios.log_ratio > -1),
        ),
    )
    made = apply(
        ratio_gap([[-2.0], [-2.0]], rewards=[1, 0]),
        signed,
        params={},
        advantage="group",
        zero_variance="drop",
        denominator="all",
        max_lag=None,
    )
    assert made.keep.tolist() == [True, False]
    assert torch.equal(made.advantages, torch.tensor([0.5, -0.5]))


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_is_another_name_and_hides_none(name):
    assert find(name) is PRESETS[ALIASES[name]]
    assert name not in PRESETS
    assert f"also called {name}" in explain(name) or f", {name}" in explain(name)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sequence_mask", "seq-mis"),
        ("sequence_truncate", "seq-tis"),
        ("token_mask", "mis"),
        ("token_truncate", "tis"),
        ("seq_mean_k1", "geo"),
        ("seq_max_k3", "k3-max"),
        ("icepop", "mis"),
    ],
)
def test_names_of_other_frameworks_mean_what_they_mean_there(name, kind):
    assert find(name).name == kind


def test_every_constant_at_its_limits_leaves_equal_policies_uncorrected():
    gap = ratio_gap([[0.0], [0.0, 0.0]])
    for preset in PRESETS.values():
        if "cap" in preset.constants:
            continue  # below 1 it scales every weight
        limits = [
            {key: value}
            for key, item in preset.constants.items()
            for value in (item.low + 1e-9 * item.open_low, min(item.high, 1e3))
            if not (key.startswith(("k_", "lambda_")))  # 1 at W = 1 for any, but for rounding
        ]
        for params in limits:
            made = correct(gap, preset=preset.name, params=params)
            assert made.weight.tolist() == [1, 1, 1], (preset.name, params)


def test_filters_reject_in_order_before_the_weights():
    # The geometric filter takes the first episode, mean .05. Of the rest d² is .09, .09, 0: more
    # than τ on average, so that the second moment takes the larger two.
    gap = ratio_gap([[0.05, 0.05], [0.3, -0.3], [0.0]], rewards=[0, 1, 2])
    filters = {"geo": {"high": 1.02}, "m2po": {"tau": 0.05}}
    made = correct(gap, preset="tis", filters=filters)
    assert made.keep.tolist() == [False, False, False, False, True]
    assert made.metrics["excluded/filtered_episodes"].sum == 1  # a token filter rejects no episode
    # First, the second moment finds the small ones as well, a mean of .037, and takes none.
    other = correct(gap, preset="tis", filters=dict(reversed(filters.items())))
    assert other.keep.tolist() == [False, False, True, True, True]
    assert other.weight.tolist() == pytest.approx([0, 0, math.exp(0.3), math.exp(-0.3), 1])


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"tis": {}}, r"correction\.filters must be one of mis, .*got 'tis'"),
        ({"gio": {}}, r"got 'gio'; did you mean 'geo'"),
        ({"geo": {"lo": 1.0}}, r"correction\.filters\.geo\.lo must be one of low, high"),
        ({"geo": {"low": 2.0}}, r"correction\.filters\.geo\.low must be <= 1, got 2\.0"),
    ],
)
def test_a_wrong_filter_is_refused_with_its_place(filters, message):
    with pytest.raises(ConfigError, match=message):
        correct(ratio_gap([[0.0]]), preset="tis", filters=filters)


def test_normalised_weights_have_mean_one_over_what_is_kept():
    d = [[math.log(x) for x in (0.5, 1.0, 4.0)], [math.log(8.0), 0.0]]
    made = correct(ratio_gap(d, rewards=[1, 0]), preset="mis", normalize=True)
    # Kept and capped: .5, 1, 4, 1, mean 1.625.
    assert made.weight.tolist() == pytest.approx([0.5 / 1.625, 1 / 1.625, 4 / 1.625, 0, 1 / 1.625])
    assert made.metrics["weight/raw"].max == pytest.approx(8)
    nothing = correct(ratio_gap([[9.0], [9.0]]), preset="mis", normalize=True)
    assert nothing.weight.tolist() == [0, 0]


def test_the_scope_of_a_choice_is_that_of_its_widest_part():
    assert widest(["token", "sequence", "token"]) == "sequence"
    assert widest(["group", "sequence"]) == "group"
    assert widest(["batch", "group"]) == "batch"


def test_a_filter_of_whole_episodes_has_the_scope_of_its_group():
    for preset in FILTERS.values():
        test = preset.filter
        if test.level.whole_episode and not test.signed:
            assert preset.scope == "group", preset.name
