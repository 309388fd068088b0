import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trueup.losses.advantages import group_advantages, without_rejected

KINDS = ("group", "group_std", "leave_one_out")


def run(rewards, groups, kind, counted=None):
    e = len(rewards)
    return group_advantages(
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(groups),
        counted=torch.ones(e, dtype=torch.bool) if counted is None else torch.tensor(counted),
        kind=kind,
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("group", [-1, 1, 0]),
        ("group_std", [-1, 1, 0]),  # deviations −1, 1, 0: sample variance 2/2
        ("leave_one_out", [-1.5, 1.5, 0]),  # 0 − (2+1)/2, 2 − 1/2, 1 − 2/2
    ],
)
def test_a_group_of_three_by_hand(kind, expected):
    assert run([0, 2, 1], [4, 4, 4], kind).value.tolist() == pytest.approx(expected)


def test_the_standard_deviation_is_the_sample_one():
    # Deviations ±.5: sample variance .5.
    assert run([0, 1], [0, 0], "group_std").value.tolist() == pytest.approx(
        [-math.sqrt(0.5), math.sqrt(0.5)]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_members_that_do_not_count_leave_the_baseline(kind):
    with_fourth = run([0, 9, 2, 1], [0, 0, 0, 0], kind, [True, False, True, True])
    without = run([0, 2, 1], [0, 0, 0], kind)
    assert with_fourth.value[[0, 2, 3]].tolist() == without.value.tolist()
    assert with_fourth.value[1] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_groups_without_contrast_have_advantage_zero_and_are_counted(kind):
    # Group 3: equal rewards. Group 1: one counted member. Group 8: none. Group 0: contrast.
    found = run(
        [0.1, 0.1, 0.1, 5, 7, 2, 0, 1],
        [3, 3, 3, 1, 1, 8, 0, 0],
        kind,
        [True, True, True, True, False, False, True, True],
    )
    assert found.value[:6].tolist() == [0.0] * 6
    assert found.contrast.tolist() == [False] * 6 + [True] * 2
    assert (int(found.num_with_contrast), int(found.num_without_contrast)) == (1, 2)


def test_group_ids_and_layout_do_not_matter():
    grouped = run([0, 1, 3, 5], [0, 0, 1, 1], "group").value
    interleaved = run([0, 3, 1, 5], [-7, 900, -7, 900], "group").value
    assert interleaved.tolist() == grouped[[0, 2, 1, 3]].tolist()


rewards = st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=12)


@given(rewards)
def test_advantages_of_a_group_sum_to_zero(values):
    for kind in KINDS:
        total = float(run(values, [0] * len(values), kind).value.double().sum())
        assert total == pytest.approx(0, abs=1e-2)


@given(rewards)
def test_leave_one_out_is_the_group_advantage_times_n_over_n_minus_one(values):
    n = len(values)
    group = run(values, [0] * n, "group").value
    torch.testing.assert_close(
        run(values, [0] * n, "leave_one_out").value, group * n / (n - 1), rtol=1e-5, atol=1e-4
    )


@given(rewards)
def test_a_standardised_advantage_is_bounded_without_epsilon(values):
    n = len(values)
    bound = (n - 1) / math.sqrt(n)
    assert float(run(values, [0] * n, "group_std").value.abs().max()) <= bound + 1e-5


def rest(values, groups, counted):
    return without_rejected(
        torch.tensor(values), torch.tensor(groups), counted=torch.tensor(counted)
    )


def test_a_rejected_member_leaves_the_baseline_of_advantages_made_elsewhere():
    """Rewards 7, 3, 2 of mean 4; without the first the mean is 2.5. The other group lost nobody."""
    found = rest([3.0, -1.0, -2.0, 0.7, 0.1], [4, 4, 4, 9, 9], [False, True, True, True, True])
    assert found.value.tolist() == pytest.approx([0.0, 0.5, -0.5, 0.7, 0.1])
    assert found.contrast.tolist() == [True, True, True, True, True]
    assert (found.num_with_contrast, found.num_without_contrast) == (2, 0)


def test_what_is_left_alone_in_its_group_has_no_contrast():
    found = rest([1.0, -1.0, 0.5], [0, 0, 1], [False, True, False])
    assert found.value.tolist() == [0.0, 0.0, 0.0]
    assert (found.num_with_contrast, found.num_without_contrast) == (0, 1)


@given(rewards)
def test_where_nobody_is_rejected_advantages_are_unchanged_bit_for_bit(values):
    counted = [True] * len(values)
    for groups in ([0] * len(values), list(range(len(values)))):
        found = rest(values, groups, counted)
        assert torch.equal(found.value, torch.tensor(values))
        assert found.contrast.all()
        assert found.num_without_contrast == 0
