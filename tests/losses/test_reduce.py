import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trueup.losses.reduce import aggregation, token_sum

KINDS = ("token_mean", "sequence_mean", "sequence_sum")
EPISODE = torch.tensor([0, 0, 0, 1])
TERMS = torch.tensor([3.0, 0.0, 3.0, 8.0])


def reduced(kind, counted, keep, episode=EPISODE, terms=TERMS, num_episodes=3):
    counted, keep = torch.tensor(counted), torch.tensor(keep)
    found = aggregation(
        kind, counted=counted, episode=episode, num_episodes=num_episodes, constant=4.0
    )
    return float(token_sum(terms * found.share, keep, denominator=found.denominator))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", 14 / 4),
        ("sequence_mean", (6 / 3 + 8 / 1) / 2),
        ("sequence_sum", (6 / 4 + 8 / 4) / 2),
    ],
)
def test_two_episodes_by_hand_beside_one_without_tokens(kind, expected):
    assert reduced(kind, [True] * 4, [True] * 4) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "all_", "kept"),
    [
        ("token_mean", 11 / 4, 11 / 3),
        ("sequence_mean", (3 / 3 + 8) / 2, (3 / 2 + 8) / 2),
        ("sequence_sum", (3 / 4 + 2) / 2, (3 / 4 + 2) / 2),
    ],
)
def test_the_denominator_counts_all_tokens_or_the_kept(kind, all_, kept):
    """The first token is rejected."""
    keep = [False, True, True, True]
    assert reduced(kind, [True] * 4, keep) == pytest.approx(all_)
    assert reduced(kind, keep, keep) == pytest.approx(kept)


def test_episodes_of_equal_length_make_the_mean_of_means_the_mean():
    episode, terms = torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 5.0, -2.0, 7.0])
    of = {k: reduced(k, [True] * 4, [True] * 4, episode, terms) for k in KINDS}
    assert of["token_mean"] == pytest.approx(of["sequence_mean"])
    assert of["sequence_sum"] == pytest.approx(of["sequence_mean"] * 2 / 4)  # length / constant


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_counted_is_zero_and_no_exception(kind):
    assert reduced(kind, [False] * 4, [False] * 4) == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.booleans(), st.floats(-9, 9)), min_size=1, max_size=20
    ),
    st.sets(st.integers(0, 4)),
)
def test_shares_and_counts_of_two_shards_are_those_of_the_whole(rows, mine):
    rows = sorted(rows)
    episode = torch.tensor([row[0] for row in rows])
    counted = torch.tensor([row[1] for row in rows])
    here = torch.tensor([row[0] in mine for row in rows])
    for kind in KINDS:
        whole, left, right = (
            aggregation(
                kind,
                counted=counted[part],
                episode=episode[part],
                num_episodes=5,
                constant=7.0,
            )
            for part in (here | ~here, here, ~here)
        )
        assert torch.equal(whole.share[here], left.share)
        assert torch.equal(whole.share[~here], right.share)
        assert whole.count == left.count + right.count
