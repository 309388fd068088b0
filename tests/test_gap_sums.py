import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.gaps import make_gap
from trueup.gap import run_sums


def test_runs_are_summed_in_order_and_an_empty_run_is_0():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0])
    found = run_sums(values, torch.tensor([0, 2, 0, 1, 1, 0]))
    assert found.tolist() == [0, 3, 0, 4, 8, 0]
    assert found.dtype == torch.float64
    assert run_sums(values[:0], torch.tensor([0, 0])).tolist() == [0, 0]
    assert run_sums(values > 1, torch.tensor([1, 3])).tolist() == [0, 3]


def test_a_sum_needs_no_gradient():
    values = torch.ones(3, requires_grad=True)
    assert not run_sums(values, torch.tensor([3])).requires_grad


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=12), seed=st.integers(0, 1000))
def test_runs_agree_with_a_scatter(lengths, seed):
    length = torch.tensor(lengths)
    gen = torch.Generator().manual_seed(seed)
    values = torch.randn(int(length.sum()), generator=gen)
    index = torch.arange(len(length)).repeat_interleave(length)
    expected = torch.zeros(len(length), dtype=torch.float64).index_add(0, index, values.double())
    assert torch.allclose(run_sums(values, length), expected, rtol=0, atol=1e-12)


def test_episodes_of_several_segments_are_summed_whole_and_spread_back():
    gap = make_gap([[-1.0, -2.0], [], [-3.0]], [[-1.5, -2.5], [], [-3.5]])
    assert gap.length.tolist() == [2, 0, 1]
    assert gap.episode_sum(gap.logp_target).tolist() == [-3, 0, -3]
    assert gap.per_token(torch.tensor([5.0, 6.0, 7.0])).tolist() == [5, 5, 7]


@pytest.mark.parametrize("known", [True, False])
def test_no_sum_is_taken_at_less_than_float64(known):
    # 2^24 + 1 is no float32.
    values = torch.ones(2**24 + 1, dtype=torch.bool if known else torch.float32)
    assert run_sums(values, torch.tensor([len(values)])).tolist() == [2**24 + 1]
