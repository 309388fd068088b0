from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.training.task_stream import TaskStream
from trueup.types import Task


def tasks(count: int) -> list[Task]:
    return [Task(id=f"t{i}", split="train") for i in range(count)]


def test_draws_count_up_from_the_low_water_mark_past_what_is_committed():
    stream = TaskStream(tasks(3), 0, low_water=4, committed=[5, 6, 9])
    assert [stream.draw() for _ in range(5)] == [4, 7, 8, 10, 11]


@given(st.integers(1, 12), st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_each_epoch_is_a_permutation_of_the_tasks(count: int, seed: int, epoch: int):
    stream = TaskStream(tasks(count), seed)
    drawn = [stream.task(epoch * count + i) for i in range(count)]
    assert sorted(task.id for task in drawn) == sorted(task.id for task in tasks(count))


def test_epochs_and_seeds_differ_in_their_order():
    orders = {
        tuple(TaskStream(tasks(20), seed).task(epoch * 20 + i).id for i in range(20))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


@given(st.integers(1, 9), st.integers(0, 99), st.lists(st.integers(0, 60)))
def test_what_a_draw_is_depends_on_the_seed_alone(count: int, seed: int, asked: list[int]):
    stream, other = TaskStream(tasks(count), seed), TaskStream(tasks(count), seed, low_water=17)
    assert [stream.task(draw) for draw in asked] == [other.task(draw) for draw in reversed(asked)][
        ::-1
    ]


def test_the_low_water_mark_is_the_first_draw_that_is_not_committed():
    stream = TaskStream(tasks(2), 0)
    for draw in (2, 0, 1, 4):
        stream.commit(draw)
    assert stream.state() == {"low_water": 3, "committed": [4]}
    stream.commit(3)
    assert stream.state() == {"low_water": 5, "committed": []}


def test_a_draw_committed_again_leaves_nothing_behind():
    stream = TaskStream(tasks(2), 0)
    for draw in (0, 2, 2, 0, 1, 1, 2):
        stream.commit(draw)
    assert stream.state() == {"low_water": 3, "committed": []}


@given(st.lists(st.integers(0, 30)))
def test_the_state_holds_exactly_what_was_committed(draws: list[int]):
    stream = TaskStream(tasks(3), 0)
    for draw in draws:
        stream.commit(draw)
    state = stream.state()
    first_missing = next(i for i in range(32) if i not in draws)
    assert state["low_water"] == first_missing
    assert state["committed"] == sorted({draw for draw in draws if draw > first_missing})


@settings(max_examples=50)
@given(st.data())
def test_every_draw_is_trained_exactly_once_in_any_order_and_across_resumes(data: st.DataObject):
    """L1: a life draws ahead of what it trains and ends anywhere; the next goes on from the last
    checkpoint, and what was trained after it does not count."""
    stream = TaskStream(tasks(5), 7)
    trained: list[int] = []
    for _ in range(data.draw(st.integers(1, 4), "lives")):
        buffer: list[int] = []
        checkpoint = (stream.state(), list(trained))
        for _ in range(data.draw(st.integers(0, 12), "steps")):
            buffer += [stream.draw() for _ in range(data.draw(st.integers(0, 3), "drawn"))]
            if buffer:
                draw = buffer.pop(data.draw(st.integers(0, len(buffer) - 1), "which"))
                trained.append(draw)
                stream.commit(draw)
            if data.draw(st.booleans(), "checkpoint"):
                checkpoint = (stream.state(), list(trained))
        state, trained = checkpoint
        stream = TaskStream(tasks(5), 7, **state)
    until = max([*trained, 7]) + 1
    while stream.state()["low_water"] < until:
        draw = stream.draw()
        trained.append(draw)
        stream.commit(draw)
    assert Counter(trained) == Counter(range(stream.state()["low_water"]))


def test_a_resumed_stream_passes_what_was_committed_beyond_the_mark_also_once_the_mark_has():
    stream = TaskStream(tasks(5), 0, low_water=0, committed=[1])
    assert stream.draw() == 0
    stream.commit(0)
    assert stream.draw() == 2


@pytest.mark.parametrize("trained_before", [(0, 1), (1, 0), (2, 5), (7, 3)])
def test_a_checkpoint_in_mid_buffer_loses_none_of_ids_0_to_7(trained_before: tuple[int, ...]):
    stream = TaskStream(tasks(8), 0)
    drawn = [stream.draw() for _ in range(8)]
    assert drawn == list(range(8))
    for draw in trained_before:
        stream.commit(draw)
    resumed = TaskStream(tasks(8), 0, **stream.state())
    again = [resumed.draw() for _ in range(6)]
    assert sorted([*trained_before, *again]) == list(range(8))
