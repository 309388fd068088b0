import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from support.gaps import ratio_gap
from trueup.config import CorrectionConfig, TrainConfig
from trueup.corrections.compose import ZeroVarianceKind, apply, correct
from trueup.corrections.table import PRESETS, explain
from trueup.errors import ConfigError
from trueup.losses.advantages import AdvantageKind
from trueup.losses.reduce import DenominatorKind


def test_the_configuration_offers_exactly_the_presets_of_the_table():
    assert get_args(CorrectionConfig.model_fields["preset"].annotation) == tuple(PRESETS)


@pytest.mark.parametrize(
    ("section", "field", "kind"),
    [
        (TrainConfig, "advantage", AdvantageKind),
        (TrainConfig, "zero_variance", ZeroVarianceKind),
        (CorrectionConfig, "denominator", DenominatorKind),
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
        ("mis", {"low": 6.0}, r"params\.low must be <= high \(5\), got 6\.0"),
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
        signed_filter=lambda ratios, constants: (ratios.advantage > 0) | (ratios.log_ratio > -1),
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


def test_the_concept_page_states_every_preset_and_formula():
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "corrections.md").read_text()
    for name, preset in PRESETS.items():
        assert f"| `{name}` | {preset.formula} |" in page
        assert f"| {preset.scope} | {preset.source} |" in page
