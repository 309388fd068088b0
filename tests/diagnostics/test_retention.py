import math

import pytest
import torch

from support.gaps import ratio_gap
from trueup.diagnostics.metrics import metrics_of
from trueup.diagnostics.retention import retention, retention_values, variance_amplification

# Four episodes of 1, 1, 2 and 4 action tokens; rewards 0, 1, 2, 3.
GAP = ratio_gap([[0.0], [0.0], [0.0] * 2, [0.0] * 4])
KEEP = torch.tensor([True, True, True, False, True, False, False, False])
ADVANTAGE = torch.tensor([-2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])


def test_shares_worked_out_by_hand():
    found = retention(GAP, keep=KEEP, advantage=ADVANTAGE, weight=torch.ones(8))
    assert (found.tokens, found.episodes) == (0.5, 1.0)
    assert found.advantage_mass == pytest.approx(5 / 9)
    lengths = {g.low: (g.episodes, g.kept_episodes, g.kept_tokens) for g in found.by_length}
    assert lengths == {1: (2, 1.0, 1.0), 2: (1, 1.0, 0.5), 4: (1, 1.0, 0.25)}
    rewards = {g.low: (g.episodes, g.kept_tokens) for g in found.by_reward}
    assert rewards == {0: (1, 1.0), 1: (3, pytest.approx(3 / 7))}
    signs = {g.low: (g.episodes, g.kept_tokens) for g in found.by_advantage}
    assert signs == {-1: (1, 1.0), 1: (3, pytest.approx(3 / 7))}


def test_what_was_dropped_for_want_of_contrast_is_no_rejection():
    found = retention(GAP, keep=KEEP, among=GAP.episode < 3)
    assert found.tokens == pytest.approx(3 / 4)
    assert [g.low for g in found.by_length] == [1, 2]


def test_many_lengths_are_four_groups_of_equal_size():
    gap = ratio_gap([[0.0] * n for n in range(1, 41)])
    found = retention(gap, keep=torch.ones(gap.num_tokens, dtype=torch.bool))
    assert [g.episodes for g in found.by_length] == [10] * 4
    assert (found.by_length[0].low, found.by_length[3].high) == (1, 40)


def test_amplification_is_the_growth_of_the_spread():
    every = torch.ones(4, dtype=torch.bool)
    a, w = torch.tensor([-1.0, 1.0, -1.0, 1.0]), torch.tensor([1.0, 3.0, 1.0, 3.0])
    # A·w = −1, 3, −1, 3: std 2 about 1; std of A is 1.
    assert float(variance_amplification(a, w, every, every)) == pytest.approx(2.0)
    # The second pair rejected: −1, 3, 0, 0: mean .5, mean square 2.5, variance 2.25.
    half = torch.tensor([True, True, False, False])
    assert float(variance_amplification(a, w, half, every)) == pytest.approx(1.5)
    assert float(variance_amplification(a, w, half, half)) == pytest.approx(2.0)
    # Equal advantages have no spread: √(E[A²w²]/E[A²]) = √((1 + 9)/2).
    same = torch.full((4,), 2.0)
    assert float(variance_amplification(same, w, every, every)) == pytest.approx(math.sqrt(5))
    assert float(variance_amplification(0 * a, w, every, every)) == 0
    assert float(variance_amplification(a[:0], w[:0], every[:0], every[:0])) == 0


def test_the_recorded_metrics_are_the_same_figures():
    every = torch.ones(8, dtype=torch.bool)
    found = retention(GAP, keep=KEEP, advantage=ADVANTAGE, weight=torch.ones(8))
    metrics = metrics_of(
        retention_values(GAP, keep=KEEP, among=every, advantage=ADVANTAGE, weight=torch.ones(8))
    )
    assert metrics["kept/advantage_mass"].mean == pytest.approx(found.advantage_mass)
    assert metrics["kept/advantage_mass"].count == 9  # Σ|A|: shards merge
    assert metrics["kept/positive_reward"].mean == pytest.approx(3 / 7)
    assert metrics["kept/other_reward"].mean == 1
    # Quarters of the lengths 1, 1, 2, 4: at most 1, at least 2.5.
    assert (metrics["kept/shortest_quarter"].count, metrics["kept/longest_quarter"].count) == (2, 1)
    assert metrics["kept/episode_tokens"].mean == 2
    assert metrics["advantage/amplification"].mean == pytest.approx(found.amplification)


def test_episodes_of_one_length_have_no_quarters():
    gap = ratio_gap([[0.0] * 3] * 4)
    every = torch.ones(12, dtype=torch.bool)
    metrics = metrics_of(
        retention_values(
            gap, keep=every, among=every, advantage=torch.ones(12), weight=torch.ones(12)
        )
    )
    assert "kept/shortest_quarter" not in metrics


def test_nothing_gives_zeros():
    gap = ratio_gap([[], []])
    nothing = torch.zeros(0, dtype=torch.bool)
    found = retention(gap, keep=nothing, advantage=torch.zeros(0), weight=torch.zeros(0))
    assert (found.tokens, found.episodes, found.advantage_mass) == (0, 0, 0)
    assert found.by_length == ()
