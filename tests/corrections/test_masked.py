import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.gaps import ratio_gap
from trueup.corrections.compose import correct

LN2, LN3 = math.log(2), math.log(3)
# Products 6, 1/6, 1, 1; geometric means √6, 6^(−1/2), 1, 1.
GAP = ratio_gap(
    [[LN2, LN3], [-LN2, -LN3], [LN3, -LN3], [0.0, 0.0]],
    rewards=[4, 0, 1, 1],
    turns=[[0, 1], [0, 1], [0, 0], [0, 1]],
)
T, F = True, False


@pytest.mark.parametrize(
    ("preset", "params", "kept", "weights"),
    [
        ("mis", {"high": 2.5}, [T, F, T, F, F, F, T, T], [2, 0, 0.5, 0, 0, 0, 1, 1]),
        ("seq-mis", {"high": 6.5}, [T, T, F, F, T, T, T, T], [6, 6, 0, 0, 1, 1, 1, 1]),
        ("geo", {"low": 0.45}, [F, F, F, F, T, T, T, T], [0, 0, 0, 0, 1, 1, 1, 1]),
        ("turn-geo", {"high": 2.5}, [T, F, F, F, T, T, T, T], [1, 0, 0, 0, 1, 1, 1, 1]),
        ("k1-token", {}, [T, F, T, F, F, F, T, T], [1, 0, 1, 0, 0, 0, 1, 1]),
        ("k1-sum", {"high": 6.5}, [T, T, F, F, T, T, T, T], [1, 1, 0, 0, 1, 1, 1, 1]),
        ("k1-max", {"high": 3.5, "low": 0.5}, [T, T, F, F, F, F, T, T], [1, 1, 0, 0, 0, 0, 1, 1]),
        ("veto", {"low": 0.4}, [T, T, F, F, F, F, T, T], [1, 1, 0, 0, 0, 0, 1, 1]),
    ],
)
def test_what_is_kept_and_how_it_counts_by_hand(preset, params, kept, weights):
    made = correct(GAP, preset=preset, params=params, zero_variance="keep")
    assert made.keep.tolist() == kept
    assert made.weight.tolist() == pytest.approx(weights, rel=1e-6)


def test_a_rejected_episode_takes_its_reward_and_a_rejected_turn_does_not():
    # Rewards 4, 0, 1, 1: mean 1.5; without the first two, 1.
    whole = correct(GAP, preset="geo", advantage="group", zero_variance="keep")
    turns = correct(GAP, preset="turn-geo", advantage="group", zero_variance="keep")
    assert whole.advantages.tolist() == [0, 0, 0, 0, 0, 0, 0, 0]
    assert turns.advantages.tolist() == [2.5, 2.5, -1.5, -1.5, -0.5, -0.5, -0.5, -0.5]


def test_the_veto_of_a_default_constant_is_at_one_in_ten_thousand():
    gap = ratio_gap([[math.log(2e-4)], [0.0, math.log(0.5e-4)], [0.0]], rewards=[1, 5, 0])
    made = correct(gap, preset="veto")
    assert made.keep.tolist() == [True, False, False, True]
    assert made.metrics["excluded/filtered_episodes"].sum == 1


@given(
    rows=st.lists(
        st.lists(st.floats(-1 / 128, 1 / 128, width=32), min_size=1, max_size=4),
        min_size=2,
        max_size=5,
    ),
    times=st.integers(2, 4),
)
def test_repetition_of_an_episodes_tokens_changes_no_geometric_decision(rows, times):
    once, again = (
        correct(ratio_gap(some), preset="geo", params={"low": 0.996, "high": 1.004})
        for some in (rows, [row * times for row in rows])
    )
    # A mean may round differently by repetition, but not by as much as it is from a bound here.
    means = [math.exp(sum(row) / len(row)) for row in rows]
    if all(min(abs(m - 0.996), abs(m - 1.004)) > 1e-6 for m in means):
        firsts = [sum(len(r) for r in rows[:i]) for i in range(len(rows))]
        assert once.keep[firsts].tolist() == again.keep[[times * i for i in firsts]].tolist()
