"""The scheduler against a reference simulator's golden histories, and the laws of staleness."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.virtual import Rules, replay, run
from trueup.scheduling import (
    AbortEpisode,
    CloseGroup,
    DropGroup,
    EpisodeFinished,
    GroupTimedOut,
    Scheduler,
    StartEpisode,
    StartGroup,
    StartSync,
    StartTraining,
    TrainingFinished,
)

GOLDEN = json.loads((Path(__file__).parent / "golden" / "pipeline.json").read_text())["cases"]


def rules_of(case):
    slots, batch, _, _ = case["args"]
    return Rules(
        groups_per_step=batch,
        samples_per_group=1,
        slots=(slots,),
        staleness=case["kw"].get("max_staleness", 0),
        sync_mode="interrupt" if case["kw"].get("interrupt", True) else "drain",
        steps=case["kw"].get("steps", 10),
    )


@pytest.mark.parametrize("name", GOLDEN)
def test_history_equals_the_reference_event_for_event(name):
    case = GOLDEN[name]
    rules = rules_of(case)
    history = run(rules, case["durations"], *case["args"][2:], rules.steps)
    assert [list(event) for event in history.events] == case["events"]
    assert history.time == case["time"]
    lags = [lag for lag, _ in history.trained]
    assert sum(lags) / len(lags) == pytest.approx(case["staleness_mean"], abs=1e-6)
    assert max(lags) == case["staleness_max"]


def configurations(**fixed):
    options = {
        "groups_per_step": st.integers(1, 4),
        "samples_per_group": st.integers(1, 4),
        "slots": st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple),
        "staleness": st.integers(0, 4),
        "delay": st.integers(0, 3),
        "sync_every": st.integers(1, 3),
        "sync_mode": st.sampled_from(["interrupt", "drain"]),
        "consume": st.sampled_from(["accept", "drop", "requeue", "mask", "wait"]),
    }
    options |= {name: st.just(value) for name, value in fixed.items()}
    return st.builds(Rules, steps=st.just(8), **options)


def supply(draw):
    durations = draw(st.lists(st.integers(1, 9), min_size=8, max_size=32))
    while True:
        yield from map(float, durations)


@st.composite
def histories(draw, **fixed):
    """A finished run; integer times make ties the rule."""
    rules = draw(configurations(**fixed))
    train, sync = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    bad = draw(st.sets(st.integers(0, 12), max_size=6)) if rules.retries else set()

    def outcome(group, member, attempt):
        failed = (group * 5 + member * 3 + attempt) % 13 in bad and attempt < rules.retries
        return not failed, float(member % 2)

    return rules, run(rules, supply(draw), float(train), float(sync), 8, outcome=outcome)


@settings(max_examples=150, deadline=None)
@given(histories(consume="wait"))
def test_wait_never_exceeds_the_bound_and_discards_nothing(case):
    rules, history = case
    assert max(lag for lag, _ in history.trained) <= rules.bound
    assert history.dropped == []
    assert len(history.groups) == 8 * rules.groups_per_step


@settings(max_examples=60, deadline=None)
@given(histories(consume="wait", retries=2, min_survivors=1))
def test_wait_holds_the_bound_when_members_are_retried(case):
    rules, history = case
    assert max(lag for lag, _ in history.trained) <= rules.bound


@settings(max_examples=100, deadline=None)
@given(histories())
def test_staleness_is_conserved_and_no_group_is_trained_twice(case):
    _, history = case
    assert history.removed_age + history.left_age == history.exposure
    assert len(history.groups) == len(set(history.groups))
    assert not set(history.groups) & {group for group, _ in history.dropped}


@settings(max_examples=60, deadline=None)
@given(histories(delay=0, sync_every=1, consume="accept"))
def test_mean_start_staleness_stays_below_the_admission_law(case):
    rules, history = case
    lags = [lag for lag, _ in history.trained]
    assert sum(lags) / len(lags) <= rules.staleness * 7 / 8 + 1e-9


@settings(max_examples=60, deadline=None)
@given(histories(staleness=0, delay=0, sync_every=1))
def test_staleness_zero_is_synchronous_training(case):
    _, history = case
    assert {lag for lag, _ in history.trained} == {0}


@settings(max_examples=60, deadline=None)
@given(histories())
def test_recorded_events_replayed_give_the_recorded_actions(case):
    rules, history = case
    assert replay(rules, history) == [actions for _, actions in history.ticks]


@settings(max_examples=60, deadline=None)
@given(histories(consume="drop"))
def test_drop_trains_nothing_beyond_the_bound(case):
    rules, history = case
    assert max(lag for lag, _ in history.trained) <= rules.bound
    assert {reason for _, reason in history.dropped} <= {"stale"}


def test_requeue_issues_the_task_of_a_stale_group_again():
    # two slots, one long episode: it ends about four versions after it started
    rules = Rules(
        groups_per_step=1, samples_per_group=1, slots=(2,), staleness=1, consume="requeue"
    )
    history = run(rules, [1.0, 20.0, *[1.0] * 40], 3.0, 1.0, 8)
    assert history.dropped == [(1, "stale")]
    assert history.reissued == [1]


def one_engine(**changes):
    base = {"groups_per_step": 1, "samples_per_group": 4, "slots": (8,), "staleness": 1}
    return Scheduler(Rules(**{**base, **changes}))


def test_admission_is_in_whole_groups_up_to_the_budget():
    actions = one_engine(slots=(100,), staleness=2).advance()
    assert [a.group for a in actions if isinstance(a, StartGroup)] == [0, 1, 2]
    assert sum(isinstance(a, StartEpisode) for a in actions) == 12


def test_a_resumed_run_admits_staleness_plus_one_batches():
    actions = one_engine(first_version=7, slots=(100,), staleness=2).advance()
    assert sum(isinstance(a, StartGroup) for a in actions) == 3


def test_a_group_that_exceeds_the_slots_is_admitted_whole_and_refilled_per_episode():
    scheduler = one_engine(slots=(3,), staleness=0)
    first = scheduler.advance()
    assert [a.member for a in first if isinstance(a, StartEpisode)] == [0, 1, 2]
    then = scheduler.advance(EpisodeFinished(0, 1, 0, True, 0, 1.0))
    assert then == [StartEpisode(0, 3, 0, 0, 1)]


def test_failed_members_are_retried_then_the_group_closes_with_the_survivors():
    scheduler = one_engine(staleness=0, retries=1, min_survivors=2)
    scheduler.advance()
    assert scheduler.advance(EpisodeFinished(0, 2, 0, False)) == [StartEpisode(0, 2, 1, 0, 2)]
    scheduler.advance(*(EpisodeFinished(0, m, 0, True, 0, float(m)) for m in (0, 1, 3)))
    actions = scheduler.advance(EpisodeFinished(0, 2, 1, False))
    assert actions == [CloseGroup(0, "partial", (0, 1, 3)), StartTraining(0, (0,))]
    reissued = scheduler.advance(TrainingFinished(1))
    assert reissued == [StartSync(0, 1)]


def test_a_group_without_enough_survivors_is_dropped_refunded_and_issued_again():
    scheduler = one_engine(staleness=0, min_survivors=2)
    scheduler.advance()
    actions = scheduler.advance(
        EpisodeFinished(0, 0, 0, True, 0, 1.0),
        *(EpisodeFinished(0, m, 0, False) for m in (1, 2, 3)),
    )
    assert actions[:3] == [
        CloseGroup(0, "failed", (0,)),
        DropGroup(0, "failed"),
        StartGroup(1, reissue_of=0),
    ]


def test_a_timed_out_group_closes_with_its_survivors_and_withdraws_the_rest():
    scheduler = one_engine(staleness=0, min_survivors=2)
    scheduler.advance()
    scheduler.advance(*(EpisodeFinished(0, m, 0, True, 0, 0.0) for m in (0, 1)))
    actions = scheduler.advance(GroupTimedOut(0))
    assert actions[:3] == [
        AbortEpisode(0, 2, 0),
        AbortEpisode(0, 3, 0),
        CloseGroup(0, "timeout", (0, 1)),
    ]
    assert actions[3] == StartTraining(0, (0,))
    assert scheduler.num_running == 2
    scheduler.advance(EpisodeFinished(0, 2, 0, False), EpisodeFinished(0, 3, 0, False))
    assert scheduler.num_running == 0


def test_zero_variance_groups_are_refunded_so_that_admission_counts_what_is_consumed():
    # 40 % of the groups have no contrast; the mean lag must stay within η all the same
    rules = Rules(
        groups_per_step=2,
        samples_per_group=2,
        slots=(16,),
        staleness=2,
        refill_zero_variance=True,
        steps=30,
    )
    history = run(
        rules,
        (1.0 + (i * 7 % 5) for i in range(100_000)),
        6.0,
        1.0,
        30,
        outcome=lambda g, m, a: (True, float(m) if g % 5 > 1 else 0.0),
    )
    lags = [lag for lag, _ in history.trained]
    refunded = sum(reason == "zero_variance" for _, reason in history.dropped)
    assert refunded / (refunded + len(history.groups)) == pytest.approx(0.4, abs=0.03)
    assert sum(lags) / len(lags) <= 2


def test_a_step_that_learns_nothing_makes_no_version_and_refunds_its_groups():
    scheduler = one_engine(groups_per_step=1, samples_per_group=1, slots=(1,), staleness=0, steps=2)
    scheduler.advance()
    assert scheduler.advance(EpisodeFinished(0, 0, 0, True, 0, 0.0))[-1] == StartTraining(0, (0,))
    assert scheduler.advance(TrainingFinished(0)) == [StartGroup(1), StartEpisode(1, 0, 0, 0, 0)]
    scheduler.advance(EpisodeFinished(1, 0, 0, True, 0, 0.0))
    scheduler.advance(TrainingFinished(0))
    assert scheduler.is_over
    assert scheduler.version == 0


def test_an_engine_that_is_due_to_sync_starts_nothing_before_it_has_synced():
    scheduler = one_engine(groups_per_step=1, samples_per_group=1, slots=(2,), sync_mode="drain")
    scheduler.advance()
    scheduler.advance(EpisodeFinished(0, 0, 0, True, 0, 0.0))
    assert scheduler.advance(TrainingFinished(1)) == []
    assert scheduler.waits_for == "engines drain before a sync"
    assert scheduler.advance(EpisodeFinished(1, 0, 0, True, 0, 0.0)) == [
        CloseGroup(1, "complete", (0,)),
        StartSync(0, 1),
    ]


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_free_slots_are_filled_on_the_freest_engine_first(engines):
    scheduler = one_engine(slots=(2,) * engines, samples_per_group=1, groups_per_step=engines)
    started = [a for a in scheduler.advance() if isinstance(a, StartEpisode)]
    assert [a.engine for a in started] == [*range(engines), *range(engines)]
