from dataclasses import replace
from math import log, sqrt

import pytest
import torch

from support.gaps import ratio_gap
from trueup.corrections.table import PRESETS
from trueup.corrections.whatif import Head, Replay, whatif
from trueup.errors import ConfigError, DataError

NAN = float("nan")
PLAIN = Replay(advantage="group")


def rows(gaps, *presets, **more):
    found = whatif(gaps, presets=presets, replay=PLAIN, **more)
    assert not found.refused
    return {row.preset: row for row in found.rows}


def test_what_is_left_and_what_grows_is_worked_out_by_hand():
    gap = ratio_gap([[log(4), 0.0], [0.0, 0.0]], rewards=[1.0, -1.0])
    found = rows([gap], "none", "tis", "mis")
    # ρA = 4, 1, −1, −1; wA = 1, 1, −1, −1 | 2, 1, −1, −1 | 4, 1, −1, −1
    assert found["none"].left == pytest.approx(3 / 7)
    assert found["tis"].left == pytest.approx(2 / 7)
    assert found["mis"].left == pytest.approx(0.0, abs=1e-6)
    assert [found[name].second for name in found] == pytest.approx([1.0, 7 / 4, 19 / 4])
    assert found["tis"].weight_mean == pytest.approx(5 / 4)
    assert (found["tis"].weight_max, found["tis"].over_cap) == (2.0, 0.25)
    assert found["none"].over_cap is None
    assert found["tis"].ess_tokens == pytest.approx(25 / 28)
    assert found["tis"].ess_episodes == pytest.approx(9 / 10)


def test_first_moments_of_opposite_sign_cancel_in_net_and_not_in_left():
    gap = ratio_gap([[log(4)], [log(4)]], rewards=[1.0, -1.0])
    row = rows([gap], "none")["none"]
    assert row.left == pytest.approx(6 / 8)
    assert row.net == pytest.approx(0.0, abs=1e-6)


def test_kept_shares_tell_lengths_and_rewards_apart():
    gap = ratio_gap(
        [[0.0], [0.0] * 2, [0.0] * 3, [log(10), 0.0, 0.0, log(10)]], rewards=[0.0, 0.0, 0.0, 1.0]
    )
    row = rows([gap], "mis")["mis"]
    assert row.kept.by_length == (1.0, 1.0, 1.0, 0.5)
    assert (row.kept.rewarded, row.kept.unrewarded) == (0.5, 1.0)
    assert (row.kept.tokens, row.kept.episodes) == (0.8, 1.0)
    assert (row.denominator_all, row.denominator_kept) == (10, 8)


def test_episodes_of_one_length_are_one_quarter():
    row = rows([ratio_gap([[0.0], [0.0]])], "none")["none"]
    assert row.kept.by_length == (None, None, 1.0, None)


def test_a_missing_log_prob_takes_part_in_nothing():
    with_hole = ratio_gap([[log(4), NAN, 0.0], [0.0, 0.0]], rewards=[1.0, -1.0])
    without = ratio_gap([[log(4), 0.0], [0.0, 0.0]], rewards=[1.0, -1.0])
    ours, theirs = (rows([gap], "tis")["tis"] for gap in (with_hole, without))
    assert (ours.left, ours.second, ours.kept) == (theirs.left, theirs.second, theirs.kept)
    assert ours.denominator_all == 5


def test_without_a_gap_all_presets_do_nothing():
    gap = ratio_gap([[0.0] * 3, [0.0] * 5, [0.0]], rewards=[1.0, 0.0, -1.0])
    found = whatif([gap, gap], replay=PLAIN)
    assert {row.preset for row in found.rows} | found.refused.keys() == PRESETS.keys()
    assert len(found.rows) >= 4
    for row in found.rows:
        assert (row.left, row.net) == pytest.approx((0.0, 0.0), abs=1e-12)
        assert row.second == pytest.approx(1.0)
        assert row.weight_mean == row.weight_max == 1.0
        assert row.kept.tokens == row.kept.rewarded == row.kept.unrewarded == 1.0
        assert row.denominator_all == row.denominator_kept == 9


def test_the_same_step_batch_twice_says_the_same():
    gap = ratio_gap([[log(4), 0.0], [0.3, -0.2, 0.0]], rewards=[1.0, -1.0])
    for once, twice in zip(whatif([gap]).rows, whatif([gap, gap]).rows, strict=True):
        assert once.kept == twice.kept
        assert once.weight_max == twice.weight_max
        for name in ("left", "net", "second", "weight_mean", "ess_tokens", "denominator_all"):
            assert getattr(once, name) == pytest.approx(getattr(twice, name))


def test_without_contrast_neither_bias_nor_variance_is_told():
    row = rows([ratio_gap([[log(4)], [0.0]], rewards=[1.0, 1.0])], "tis")["tis"]
    assert (row.left, row.net, row.second) == (None, None, None)
    assert row.weight_max == 2.0


def test_the_cosine_is_that_of_the_gradients_of_the_head():
    gap = ratio_gap([[log(4)], [0.0]], rewards=[1.0, -1.0])
    # Two actions equally likely: scores (½, −½) of the first token times h = (1, 0), and (−½, ½) of
    # the second times (0, 1). So gradients are orthogonal, of one length, with coefficients (2, −1)
    # for `tis` and (4, −1) for the full ratio.
    head = Head(hidden=torch.eye(2), logits=torch.zeros(2, 2), token=torch.tensor([0, 1]))
    found = rows([gap, gap], "tis", "is", heads=[head, head])
    assert found["tis"].cosine == pytest.approx(9 / sqrt(5 * 17))
    assert found["is"].cosine == pytest.approx(1.0)
    assert rows([gap], "tis")["tis"].cosine is None
    with pytest.raises(DataError, match="must be of 3 tokens"):
        rows([gap], "tis", heads=[replace(head, token=torch.tensor([0, 1, 0]))])


def test_a_preset_that_rejects_everything_is_a_row_of_nothing():
    gap = ratio_gap([[log(9)], [log(8)]], rewards=[1.0, -1.0])
    dropping = replace(PLAIN, zero_variance="drop")
    (row,) = whatif([gap], presets=["seq-mis"], replay=dropping).rows
    assert (row.weight_mean, row.weight_max, row.ess_tokens, row.second) == (0.0, 0.0, 0.0, 0.0)
    assert (row.kept.tokens, row.denominator_all, row.left) == (0.0, 0.0, 1.0)


def test_what_cannot_be_replayed_is_refused():
    with pytest.raises(DataError, match=r"with an action token whose log μ is known, got 'none"):
        whatif([ratio_gap([[NAN, NAN]])])
    with pytest.raises(ConfigError, match=r"correction\.preset"):
        whatif([ratio_gap([[0.0]])], presets=["tiss"])
