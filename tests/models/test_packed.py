from array import array
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trueup.errors import DataError
from trueup.models.packed import PackedBatch, microbatches
from trueup.types import Segment


def _pack(*segments: tuple[list[int], list[int]]) -> PackedBatch:
    return PackedBatch.pack(
        [array("i", ids) for ids, _ in segments], [array("b", flags) for _, flags in segments]
    )


def _unpack(batch: PackedBatch) -> list[tuple[list[int], list[int]]]:
    flags = torch.zeros(len(batch.token_ids), dtype=torch.long)
    flags[batch.action_index] = 1
    return [
        (batch.token_ids[start:stop].tolist(), flags[start:stop].tolist())
        for start, stop in pairwise(batch.offsets.tolist())
    ]


_SEGMENT = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 1)), min_size=1, max_size=9).map(
    lambda rows: ([i for i, _ in rows], [0, *(flag for _, flag in rows[1:])])
)
_SEGMENTS = st.lists(_SEGMENT, min_size=1, max_size=7)


def test_segments_lie_end_to_end():
    batch = _pack(([5, 6, 7], [0, 0, 1]), ([5, 8], [0, 1]))
    assert batch.token_ids.tolist() == [5, 6, 7, 5, 8]
    assert batch.offsets.tolist() == [0, 3, 5]
    assert batch.action_index.tolist() == [2, 4]
    assert batch.lengths.tolist() == [3, 2]
    assert batch.action_offsets.tolist() == [0, 1, 2]


def test_segments_of_episodes_are_packed_by_their_ids_and_flags():
    segment = Segment(
        token_ids=array("i", [5, 6]),
        action=array("b", [0, 1]),
        turn=array("i", [0, 0]),
        logp_behaviour=array("f", [-1.0]),
        spans=(),
    )
    assert _unpack(PackedBatch.from_segments([segment])) == [([5, 6], [0, 1])]


def test_no_segments_give_an_empty_batch():
    batch = PackedBatch.from_segments([])
    assert batch.token_ids.tolist() == batch.action_index.tolist() == []
    assert list(microbatches(batch, 8)) == []


@pytest.mark.parametrize("segment", [([], []), ([1], []), ([1, 2], [1, 0])])
def test_an_empty_a_ragged_and_an_unpredicted_segment_are_refused(segment):
    with pytest.raises(DataError, match="segment 1 must be"):
        _pack(([1], [0]), segment)


@given(_SEGMENTS, st.data())
def test_selecting_segments_is_packing_them(segments, data):
    chosen = data.draw(st.lists(st.integers(0, len(segments) - 1), max_size=9))
    batch = _pack(*segments)
    selected = batch.select(torch.tensor(chosen, dtype=torch.long))
    assert _unpack(selected) == [segments[index] for index in chosen]
    actions = batch.actions_of(torch.tensor(chosen, dtype=torch.long))
    assert (
        batch.token_ids[batch.action_index[actions]].tolist()
        == selected.token_ids[selected.action_index].tolist()
    )


@given(_SEGMENTS, st.integers(1, 40))
def test_microbatches_hold_every_action_once_within_the_bound(segments, tokens):
    batch = _pack(*segments)
    parts = list(microbatches(batch, tokens))
    actions = torch.cat([part.actions for part in parts])
    assert sorted(actions.tolist()) == list(range(len(batch.action_index)))
    assert sum(len(part.batch.lengths) for part in parts) == len(segments)
    for part in parts:
        padded = len(part.batch.lengths) * int(part.batch.lengths.max())
        assert padded <= tokens or len(part.batch.lengths) == 1
        assert (
            batch.token_ids[batch.action_index[part.actions]].tolist()
            == part.batch.token_ids[part.batch.action_index].tolist()
        )


@given(_SEGMENTS, st.integers(1, 40), st.data())
def test_what_belongs_together_is_in_one_microbatch(segments, tokens, data):
    units = data.draw(st.lists(st.integers(0, 3), min_size=len(segments), max_size=len(segments)))
    batch = _pack(*segments)
    parts = list(microbatches(batch, tokens, unit=torch.tensor(units)))
    owner = torch.tensor(units).repeat_interleave(batch.action_offsets.diff())
    seen = [set(owner[part.actions].tolist()) for part in parts]
    assert sum(map(len, seen)) == len(set().union(*seen))
    actions = torch.cat([part.actions for part in parts])
    assert sorted(actions.tolist()) == list(range(len(batch.action_index)))
    for part, held in zip(parts, seen, strict=True):
        padded = len(part.batch.lengths) * int(part.batch.lengths.max())
        assert padded <= tokens or len(held) <= 1


def test_units_by_themselves_are_no_constraint():
    batch = _pack(([1] * 4, [0, 1, 1, 1]), ([2], [0]), ([3] * 6, [0] * 5 + [1]), ([4] * 4, [0] * 4))
    free = list(microbatches(batch, 8))
    each = list(microbatches(batch, 8, unit=torch.arange(4)))
    assert [p.batch.token_ids.tolist() for p in free] == [p.batch.token_ids.tolist() for p in each]
    assert [len(p.batch.lengths) for p in free] == [1, 2, 1]
