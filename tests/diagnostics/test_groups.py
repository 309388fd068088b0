import pytest
import torch

from support.gaps import make_gap
from trueup.diagnostics.attribution import attribution
from trueup.diagnostics.groups import BREAKDOWNS, by_edges, by_value, position
from trueup.diagnostics.mismatch import mismatch


def test_values_and_edges_worked_out_by_hand():
    columns = torch.tensor([[1.0, 2.0, 4.0], [0.0, 1.0, 1.0]])
    found = by_value(torch.tensor([7, -1, 7]))
    assert (found.low, found.high) == ((-1, 7), (-1, 7))
    assert found.sums(columns).tolist() == [[2, 5], [1, 1]]
    bins = by_edges(torch.tensor([0.5, 0.0, 2.0]), (0.0, 0.5, 1.0))
    assert (bins.low, bins.high) == ((0.0, 0.5), (0.5, 1.0))
    assert bins.sums(columns).tolist() == [[2, 5], [1, 1]]


@pytest.mark.parametrize("values", [[], [5], [3, 3, -2, 0], [-(10**12), 10**12, 0, 0]])
def test_integers_far_apart_and_close_together_group_alike(values):
    x = torch.tensor(values, dtype=torch.int64)
    found, expected = by_value(x), by_value(x.double())
    assert found.low == expected.low == tuple(sorted(set(values)))
    assert found.index.tolist() == expected.index.tolist()


def test_a_position_is_the_share_of_its_episode_before_the_token():
    gap = make_gap([[-1.0] * 4, [], [-1.0] * 2], [[-1.0] * 4, [], [-1.0] * 2])
    assert position(gap).tolist() == [0, 0.25, 0.5, 0.75, 0, 0.5]


GAP = make_gap(
    [[-1.0, -1.0, -1.0], [-3.0]],
    [[-1.1, -1.2, -1.4], [-3.0]],
    lags=[[2, 2, 0], [0]],
    version_logps=[[-1.05, -1.1, -1.0], [-3.0]],
)
ADVANTAGE = torch.tensor([1.0, 1.0, 1.0, -1.0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lag", {0: (2, 0.2), 2: (2, 0.15)}),
        ("probability", {0.0: (1, 0.0), 0.1: (3, 0.7 / 3)}),
        ("position", {0.0: (2, 0.05), 0.25: (1, 0.2), 0.5: (1, 0.4)}),
        ("engine", {0: (4, 0.175)}),
        ("advantage", {-1: (1, 0.0), 1: (3, 0.7 / 3)}),
    ],
)
def test_each_breakdown_of_the_mismatch(name, expected):
    bins = mismatch(GAP, advantage=ADVANTAGE).breakdowns[name]
    assert [b.low for b in bins] == list(expected)
    for found, (tokens, size) in zip(bins, expected.values(), strict=True):
        assert found.tokens == tokens
        assert found.abs_mean == pytest.approx(size, abs=1e-6)


def test_the_parts_of_the_gap_by_lag():
    zero, two = attribution(GAP).breakdowns["lag"]
    assert (zero.scored, two.scored) == (2, 2)
    assert (zero.staleness_abs, zero.engine_abs) == pytest.approx((0.0, 0.2), abs=1e-6)
    assert (two.staleness_mean, two.engine_mean) == pytest.approx((0.075, 0.075), abs=1e-6)
    # d = .1, .2; staleness .05, .1: (.005 + .02)/(.01 + .04)
    assert two.staleness_share == pytest.approx(0.5, abs=1e-5)


def test_every_breakdown_holds_every_token_once():
    found, split = mismatch(GAP, advantage=ADVANTAGE), attribution(GAP, advantage=ADVANTAGE)
    assert set(found.breakdowns) == set(split.breakdowns) == set(BREAKDOWNS)
    for name in BREAKDOWNS:
        assert sum(b.tokens for b in found.breakdowns[name]) == 4
        assert sum(b.scored for b in split.breakdowns[name]) == 4


def test_without_advantages_there_is_no_breakdown_by_their_sign():
    assert "advantage" not in mismatch(GAP).breakdowns
    assert "advantage" not in attribution(GAP).breakdowns
