import math
from array import array
from dataclasses import replace

import pytest
import torch

from support.episodes import episode, segment, span
from trueup.errors import DataError
from trueup.training.step_batch import StepBatch
from trueup.types import Episode, LogprobKind

FIRST = episode(
    "first",
    segment(
        [5, 6, 7, 8, 9],
        [0, 1, 1, 0, 1],
        logps=[-0.5, -0.25, -1.5],
        spans=[span(0, 2, version=3), span(2, 3, version=4)],
    ),
    group=2,
    reward=1.0,
)
SECOND = episode(
    "second",
    segment([5, 6], [0, 1], logps=[-2.0], spans=[span(0, 1, version=4, engine="engine-1")]),
    segment([5, 8, 8], [0, 0, 1], logps=[-3.0], spans=[span(0, 1, version=5)]),
    group=2,
    reward=0.0,
)
EMPTY = episode("empty", group=3, reward=1.0)


def equal(tensor: torch.Tensor, values: list) -> bool:
    return torch.equal(tensor, torch.tensor(values, dtype=tensor.dtype))


def test_two_episodes_packed_by_hand():
    batch = StepBatch.collect([FIRST, SECOND], [4, 5])
    assert batch.num_tokens == 5
    assert batch.episodes == (FIRST, SECOND)
    assert equal(batch.packed.token_ids, [5, 6, 7, 8, 9, 5, 6, 5, 8, 8])
    assert equal(batch.packed.offsets, [0, 5, 7, 10])
    assert equal(batch.packed.action_index, [1, 2, 4, 6, 9])
    assert equal(batch.segment_episode, [0, 1, 1])
    assert equal(batch.logp_behaviour, [-0.5, -0.25, -1.5, -2.0, -3.0])
    assert equal(batch.version, [3, 3, 4, 4, 5])
    assert batch.engines == ("engine-0", "engine-1")
    assert equal(batch.engine, [0, 0, 0, 1, 0])
    assert equal(batch.reward, [1.0, 0.0])
    assert equal(batch.group, [2, 2])
    assert equal(batch.finished_version, [4, 5])
    assert batch.logp_behaviour.dtype == batch.reward.dtype == torch.float32


def test_the_gap_of_a_batch_lines_up_token_for_token():
    target = torch.tensor([-0.75, -0.25, -1.0, -2.5, -3.0])
    gap = StepBatch.collect([FIRST, SECOND], [4, 5]).gap(target, None, 6)
    assert equal(gap.lag, [3, 3, 2, 2, 1])
    assert equal(gap.log_ratio, [-0.25, 0.0, 0.5, -0.5, 0.0])
    assert equal(gap.segment_offsets, [0, 3, 4, 5])
    assert equal(gap.episode, [0, 0, 0, 1, 1])
    assert gap.logp_version is None


def test_a_token_from_the_future_is_refused():
    batch = StepBatch.collect([FIRST, SECOND], [4, 5])
    with pytest.raises(DataError, match="no version from the future"):
        batch.gap(torch.full([5], -1.0), None, 4)


def test_an_episode_without_action_tokens_is_there_and_adds_no_token():
    """C3"""
    batch = StepBatch.collect([FIRST, EMPTY, SECOND], [4, 4, 5])
    assert equal(batch.segment_episode, [0, 2, 2])
    assert equal(batch.group, [2, 3, 2])
    gap = batch.gap(torch.full([5], -1.0), None, 5)
    assert gap.num_episodes == 3
    assert equal(gap.episode, [0, 0, 0, 2, 2])


def test_a_batch_of_nothing_but_prompts_has_no_token():
    prompt = episode("prompt", segment([5, 6], [0, 0]))
    batch = StepBatch.collect([prompt], [0])
    assert batch.num_tokens == 0
    assert batch.gap(torch.zeros(0), None, 0).num_tokens == 0


def test_missing_log_probs_pass_through_as_missing():
    """C12"""
    logps = array("f", [-0.5, math.nan, -1.5])
    episode_ = with_segment(FIRST, logp_behaviour=logps)
    batch = StepBatch.collect([episode_, SECOND], [4, 5])
    gap = batch.gap(torch.full([5], -1.0), None, 5)
    assert gap.valid.tolist() == [True, False, True, True, True]
    assert gap.log_ratio[1] == 0


def with_segment(whole: Episode, **changes: object) -> Episode:
    return replace(whole, segments=(replace(whole.segments[0], **changes), *whole.segments[1:]))


@pytest.mark.parametrize("logps", [[], [-0.5, -0.25], [-0.5, -0.25, -1.5, 0.0]])
def test_log_probs_of_another_number_than_the_action_tokens_name_the_episode(logps: list[float]):
    """C13: never padded"""
    bad = with_segment(FIRST, logp_behaviour=array("f", logps))
    rule = f"episode first must be one log-prob .* got '3 action tokens, {len(logps)} log-probs"
    with pytest.raises(DataError, match=rule):
        StepBatch.collect([SECOND, bad], [5, 4])


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (span(0, 2),),
        (span(0, 4),),
        (span(0, 2), span(2, 3), span(3, 4)),
    ],
    ids=["none", "short", "long", "one more"],
)
def test_an_action_token_without_provenance_is_refused(spans: tuple):
    with pytest.raises(DataError, match=r"episode first must be .*one span position per action"):
        StepBatch.collect([with_segment(FIRST, spans=spans)], [4])


@pytest.mark.parametrize(
    "spans",
    [
        (span(0, 1), span(2, 3)),
        (span(0, 2), span(1, 3)),
        (span(1, 3),),
        (span(0, 0), span(0, 3)),
        (span(0, 3), span(3, 2)),
        (span(2, 3), span(0, 2)),
    ],
    ids=["gap", "overlap", "late", "empty", "backwards", "unordered"],
)
def test_spans_with_gap_or_overlap_are_refused(spans: tuple):
    with pytest.raises(DataError, match="spans of episode first must be without gap or overlap"):
        StepBatch.collect([with_segment(FIRST, spans=spans)], [4])


def test_estimated_log_probs_are_refused():
    spans = (span(0, 2), span(2, 3, logprob_kind=LogprobKind.ESTIMATE))
    with pytest.raises(DataError, match="log-probs of episode first must be exact"):
        StepBatch.collect([with_segment(FIRST, spans=spans)], [4])


@pytest.mark.parametrize("whole", [FIRST, EMPTY], ids=["with tokens", "without"])
def test_an_episode_without_a_reward_is_refused(whole: Episode):
    bad = replace(whole, reward=None)
    with pytest.raises(DataError, match=f"reward of episode {whole.id} must be graded"):
        StepBatch.collect([SECOND, bad], [5, 4])
