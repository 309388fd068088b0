from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.gaps import make_gap
from trueup.gap import PolicyGap

PER_TOKEN = (
    "logp_target",
    "logp_behaviour",
    "version",
    "lag",
    "engine",
    "logp_version",
    "logp_cache",
    "turn",
)


def whole():
    return make_gap(
        [[-1.0, -2.0, -3.0], [], [-4.0], [-5.0, -6.0]],
        [[-1.5, -2.5, -3.5], [], [-4.5], [-5.5, -6.5]],
        lags=[[0, 1, 2], [], [3], [4, 5]],
        groups=[7, 7, 2, 2],
        version_logps=[[-1.1, -2.1, -3.1], [], [-4.1], [-5.1, -6.1]],
    )


def test_some_tokens_keep_their_episodes_and_every_episode_stays():
    part = whole().select(torch.tensor([1, 3, 5]))
    assert part.logp_target.tolist() == [-2, -4, -6]
    assert part.lag.tolist() == [1, 3, 5]
    assert part.segment_offsets.tolist() == [0, 1, 1, 2, 3]
    assert part.episode.tolist() == [0, 2, 3]
    assert part.group.tolist() == [7, 7, 2, 2]
    assert part.reward.tolist() == whole().reward.tolist()


@given(st.sets(st.integers(0, 5)))
def test_every_column_of_tokens_is_selected(tokens):
    index = torch.tensor(sorted(tokens), dtype=torch.int64)
    gap, part = whole(), whole().select(index)
    for name in PER_TOKEN:
        value = getattr(gap, name)
        assert (value is None and getattr(part, name) is None) or torch.equal(
            value[index], getattr(part, name)
        )
    assert torch.equal(part.episode, gap.episode[index])


def test_every_field_is_either_of_tokens_or_kept_whole():
    """A field that is added must be in one of the two."""
    kept = {"segment_offsets", "segment_episode", "group", "reward"}
    assert {item.name for item in fields(PolicyGap)} == kept | set(PER_TOKEN)


def test_all_tokens_are_the_gap_and_none_are_an_empty_one():
    gap = whole()
    assert torch.equal(gap.select(torch.arange(6)).segment_offsets, gap.segment_offsets)
    empty = gap.select(torch.zeros(0, dtype=torch.int64))
    assert (empty.num_tokens, empty.num_episodes) == (0, 4)


@pytest.mark.parametrize("name", ["logp_version", "logp_cache", "turn"])
def test_an_optional_column_may_be_missing(name):
    gap = make_gap([[-1.0, -2.0]], [[-1.0, -2.0]])
    values = {item.name: getattr(gap, item.name) for item in fields(gap)} | {name: None}
    assert getattr(PolicyGap(**values).select(torch.tensor([1])), name) is None
