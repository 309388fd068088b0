import math

import pytest
import torch

from support.gaps import ratio_gap
from trueup.errors import DataError
from trueup.integrations import verl_metrics as module
from trueup.integrations.verl_metrics import verl_metrics

LN4 = math.log(4)
NAN = math.nan


def figures(rows, **kwargs):
    found = verl_metrics(ratio_gap(rows), **{"cap": 2.0} | kwargs)
    return {name.removeprefix("rollout_corr/"): value for name, value in found.items()}


def test_golden_two_rows():
    # Ratios 4, 1 and 1/4; weights 2, 1, .25 with mean 3.25/3 and mean square 5.0625/3.
    found = figures([[LN4, 0.0], [-LN4]], band=(0.5, 3.0))
    expected = {
        "rollout_is_mean": 1.083333,
        "rollout_is_max": 2.0,
        "rollout_is_min": 0.25,
        "rollout_is_ratio_fraction_high": 1 / 3,
        "rollout_is_ratio_fraction_low": 1 / 3,
        "rollout_is_std": 0.716861,  # √(1.6875 − 1.173611)
        "rollout_is_eff_sample_size": 0.695473,  # 1.173611 / 1.6875
        "rollout_is_seq_mean": 0.875,  # 1.5 and .25
        "rollout_is_seq_std": 0.883883,
        "rollout_is_seq_max": 1.5,
        "rollout_is_seq_min": 0.25,
        "rollout_is_seq_max_deviation": 0.75,
        "rollout_is_seq_fraction_high": 0.5,  # the raw mean 2.5 is above 2
        "rollout_is_seq_fraction_low": 0.5,
        "kl": 0.0,
        "k3_kl": 0.75,  # ((4 − 1 − ln 4) + 0 + (.25 − 1 + ln 4)) / 3
        "training_ppl": 2.5,  # 1 and 4
        "rollout_ppl": 1.5,  # 2 and 1
        "ppl_ratio": 2.25,  # 1/2 and 4
        "log_ppl_diff_max": LN4,
        "log_ppl_diff_min": -LN4 / 2,
        "chi2_token": 4.6875,  # (16 + 1 + .0625) / 3 − 1
        "chi2_seq": 7.03125,  # (16 + 1/16) / 2 − 1
        # Geometric means 2, inside, and 1/4, whose k1 of ln 4 is above ln 2.
        "rollout_rs_seq_mean_k1_fraction_high": 0.5,
        "rollout_rs_seq_mean_k1_fraction_low": 0.0,
        "rollout_rs_seq_mean_k1_masked_fraction": 1 / 3,
        "rollout_rs_seq_masked_fraction": 0.5,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_without_a_band_there_is_no_filter_to_report():
    assert not [name for name in figures([[0.1], [0.2]]) if "_rs_" in name]


def test_what_is_unknown_or_empty_is_left_out():
    band = (0.5, 3.0)
    plain = figures([[LN4, 0.0], [-LN4]], band=band)
    assert figures([[], [LN4, NAN, 0.0], [NAN], [-LN4], []], band=band) == plain


def test_nothing_known_is_refused():
    with pytest.raises(DataError, match="logp_behaviour"):
        figures([[NAN], []])


@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_chunks_change_nothing(monkeypatch, chunk):
    gen = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, generator=gen).tolist() for n in (5, 1, 13, 2, 30, 8)]
    whole = figures(rows, band=(0.9, 1.1))
    monkeypatch.setattr(module, "_CHUNK", chunk)
    assert figures(rows, band=(0.9, 1.1)) == pytest.approx(whole, rel=1e-12)


def test_an_enormous_ratio_leaves_every_figure_finite():
    assert all(map(math.isfinite, figures([[300.0, -300.0], [99.0]], band=(0.5, 2)).values()))


def test_one_row_has_no_spread():
    found = figures([[0.1, 0.2]], band=(0.5, 2.0))
    assert found["rollout_is_seq_std"] == found["rollout_rs_seq_mean_k1_seq_std"] == 0
