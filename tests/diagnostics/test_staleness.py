import math

import pytest
import torch

from support.gaps import ratio_gap
from trueup.diagnostics.staleness import staleness
from trueup.errors import DataError

GAP = {"lags": [[4, 4, 2], [1], [], [3]]}


def test_lags_by_token_and_by_episode():
    found = staleness(ratio_gap([[0.0, 0.0, 0.0], [0.0], [], [math.nan]], **GAP))
    assert (found.tokens, found.mean, found.max) == (4, 11 / 4, 4)
    assert found.histogram == ((1, 1), (2, 1), (4, 2))
    assert found.episode_tokens.tolist() == [3, 1, 0, 0]
    assert found.episode_mean.tolist() == pytest.approx([10 / 3, 1, 0, 0])
    assert found.episode_max.tolist() == [4, 1, 0, 0]
    assert found.episode_start.tolist() == [4, 1, 0, 0]
    assert found.in_flight is None


def test_a_lag_is_split_into_flight_and_queue():
    gap = ratio_gap([[0.0, 0.0, 0.0], [0.0], [], [0.0]], **GAP)
    found = staleness(gap, queued=torch.tensor([2, 1, 0, 3]))
    # In queue 2+2+2+1+3 = 10 of 14 over 5 tokens.
    assert found.in_queue == pytest.approx(2.0)
    assert found.in_flight == pytest.approx(0.8)


def test_finished_at_v0_and_consumed_at_v5_is_all_queue():
    found = staleness(ratio_gap([[0.0]], lags=[[5]]), queued=torch.tensor([5]))
    assert (found.mean, found.in_queue, found.in_flight) == (5, 5, 0)


def test_a_token_newer_than_its_episodes_end_is_refused():
    with pytest.raises(DataError, match="queued"):
        staleness(ratio_gap([[0.0]], lags=[[1]]), queued=torch.tensor([2]))


def test_without_tokens_there_is_no_lag():
    found = staleness(ratio_gap([[], []]))
    assert (found.tokens, found.mean, found.max, found.histogram) == (0, 0.0, 0, ())
