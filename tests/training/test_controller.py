"""The controller's loop on logical time: real scheduler, rollout, ledger and audit."""

import asyncio
from collections import Counter
from pathlib import Path
from statistics import mean

import pytest

from support.pipeline import Attempt, Pipeline
from trueup.engines.scripted import refuse
from trueup.errors import EnvironmentFault, Fault, TrainerFault, TransportFault
from trueup.records.audit import audit
from trueup.training.messages import MetricValue
from trueup.types import EpisodeStatus

CRASH = EnvironmentFault("the worker died", field="worker_lost")


def uneven(attempt: Attempt) -> int:
    """Episodes of 1 to 11 seconds."""
    return 1 + (attempt.draw * 7 + attempt.member * 3) % 11


def proven(pipeline: Pipeline) -> Pipeline:
    """A replay of what the scheduler was told gives what it decided; no invariant is broken."""
    recorded, replayed = pipeline.replayed()
    assert recorded == replayed
    assert audit(pipeline.run) == []
    return pipeline


def finished(root: Path, *overrides: str, **options: object) -> Pipeline:
    pipeline = Pipeline(root, overrides, **options)
    assert pipeline.play() == "done"
    return proven(pipeline)


# ---- the order of things -------------------------------------------------------------------------


def test_a_synchronous_run_row_by_row(tmp_path: Path):
    pipeline = finished(
        tmp_path, "train.steps=1", "train.groups_per_step=1", "schedule.staleness=0"
    )
    kinds = [event.kind for event in pipeline.events() if event.kind not in ("tick", "activity")]
    assert kinds == [
        *("run_start", "publish", "apply"),
        *("issue", "issue", "finish", "finish", "close", "claim"),
        *("train", "publish", "commit", "checkpoint", "apply", "run_end"),
    ]
    (end,) = pipeline.events("run_end")
    assert (end.version, end.payload) == (1, {"reason": "done", "message": ""})


@pytest.mark.parametrize("consume", ["accept", "drop", "requeue", "mask", "wait"])
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("mode", ["interrupt", "drain"])
def test_every_policy_runs_to_its_end_and_proves_itself(
    tmp_path: Path, consume: str, staleness: int, mode: str
):
    pipeline = finished(
        tmp_path,
        f"schedule.consume={consume}",
        f"schedule.staleness={staleness}",
        f"schedule.sync_mode={mode}",
        "engine.count=2",
        "engine.slots=4",
        tokens=uneven,
    )
    assert [event.payload["step"] for event in pipeline.events("commit")] == list(range(6))
    assert [progress.step for progress in pipeline.progress] == [1, 2, 3, 4, 5, 6]
    if consume in ("drop", "requeue", "wait"):
        assert max(max(lags) for lags in pipeline.lags()) <= staleness


@pytest.mark.parametrize("overrides", [("sync.delay=1",), ("schedule.sync_every=2",)])
def test_engines_that_stay_behind_add_to_the_lag_and_not_to_the_bound(
    tmp_path: Path, overrides: tuple[str, ...]
):
    pipeline = finished(tmp_path, "schedule.staleness=1", *overrides, tokens=uneven)
    lags = [max(lags) for lags in pipeline.lags()]
    assert max(lags) == pipeline.config.staleness_bound == 2


def test_two_runs_give_the_same_rows(tmp_path: Path):
    def told(name: str) -> list[tuple[object, ...]]:
        (tmp_path / name).mkdir()
        pipeline = finished(tmp_path / name, "schedule.staleness=2", tokens=uneven)
        return [
            (event.kind, event.episode, event.group, event.version, event.payload.get("actions"))
            for event in pipeline.events()
        ]

    assert told("one") == told("two")


# ---- versions and staleness ----------------------------------------------------------------------


def test_without_staleness_and_delay_every_lag_is_0_and_no_episode_spans_two_versions(
    tmp_path: Path,
):
    """V3"""
    pipeline = finished(tmp_path, "schedule.staleness=0", tokens=uneven)
    assert pipeline.lags() == [[0]] * (6 * 4)


def test_an_episode_that_finished_at_v0_and_is_consumed_at_v5_waited_in_the_queue(tmp_path: Path):
    """V4: six groups of one finish at once under version 0; each step takes one."""
    pipeline = finished(
        tmp_path,
        "schedule.staleness=5",
        "train.groups_per_step=1",
        "train.samples_per_group=2",
        "engine.slots=12",
        "schedule.consume=accept",
    )
    consumed = pipeline.learner.consumed
    assert [{item.finished_version for item in consumed[step]} for step in range(6)] == [{0}] * 6
    assert pipeline.lags()[-2:] == [[5], [5]]


def test_the_version_at_which_an_episode_finished_is_the_trainers_and_not_its_engines(
    tmp_path: Path,
):
    pipeline = finished(tmp_path, "schedule.staleness=0", "sync.delay=1", tokens=uneven)
    assert pipeline.lags() == [[0]] * 4 + [[1]] * (5 * 4)
    for step, items in pipeline.learner.consumed.items():
        assert {item.finished_version for item in items} == {step}


def test_a_resumed_run_admits_staleness_plus_one_batches_with_fresh_group_ids(tmp_path: Path):
    """V5"""
    overrides = ("schedule.staleness=2", "engine.slots=100", "eval.samples=1")
    first = Pipeline(tmp_path, overrides, tokens=uneven, on_step=interrupt_at(3))
    assert first.play() == "interrupted"
    ticks = len(first.events("tick"))
    used = max(event.group for event in first.events("issue"))
    second = first.resumed(3)
    assert second.play() == "done"
    proven(second)
    actions = second.events("tick")[ticks].payload["actions"]
    started = [action[1] for action in actions if action[0] == "StartGroup"]
    assert started == list(range(used + 1, used + 1 + 3 * 2))
    (event,) = second.events("resume")
    assert (event.version, event.payload["step"]) == (3, 3)
    assert event.payload["path"] == "checkpoints/step-000003"
    assert [e.payload["step"] for e in second.events("eval")] == [0, 6], "none at its start"


def test_what_a_life_that_died_left_behind_is_given_up_by_the_next(tmp_path: Path):
    overrides = ("schedule.staleness=2", "checkpoint.every=2")
    first = Pipeline(tmp_path, overrides, tokens=uneven)
    first.learner.fault = fails_at(3, TrainerFault("lost"))
    with pytest.raises(TrainerFault):
        first.play()
    second = first.resumed(2)
    assert second.start.abandoned
    assert second.play() == "done"
    proven(second)
    given_up = [e for e in second.events("drop") if e.payload["reason"] == "resume"]
    assert [(e.group, tuple(e.payload["episodes"])) for e in given_up] == list(
        second.start.abandoned
    )
    # step 2 was trained, lost with its life, and trained again
    assert [e.payload["step"] for e in second.events("commit")] == [0, 1, 2, 2, 3, 4, 5]


def test_groups_without_contrast_are_refunded_so_that_the_mean_lag_stays_within_the_bound(
    tmp_path: Path,
):
    """V6: two of five groups have equal rewards."""
    pipeline = finished(
        tmp_path,
        'train.zero_variance="refill"',
        "schedule.staleness=2",
        "schedule.consume=accept",
        "engine.slots=32",
        "train.steps=20",
        tokens=uneven,
        outcome=lambda a: 1.0 if a.draw % 5 < 2 else float(a.member % 2),
    )
    reasons = Counter(event.payload["reason"] for event in pipeline.events("close"))
    assert reasons["zero_variance"] > 10
    assert all(draw % 5 >= 2 for draw in pipeline.draws_consumed())
    assert mean(max(lags) for lags in pipeline.lags()) <= 2
    dropped = [e for e in pipeline.events("drop") if e.payload["reason"] == "zero_variance"]
    assert len(dropped) == reasons["zero_variance"]


def committed(pipeline: Pipeline) -> list[int]:
    """Draws that a resume from the last checkpoint would not draw again."""
    (*_, last) = pipeline.learner.checkpoints.values()
    return [*range(last["stream"]["low_water"]), *last["stream"]["committed"]]


def dropped_draws(pipeline: Pipeline, reason: str) -> list[int]:
    draws = {event.group: event.payload["stream"] for event in pipeline.events("close")}
    dropped = [e for e in pipeline.events("drop") if e.payload["reason"] == reason]
    return [draws[event.group] for event in dropped]


def test_a_draw_without_contrast_that_was_refunded_does_not_come_again_after_a_resume(
    tmp_path: Path,
):
    pipeline = finished(
        tmp_path,
        'train.zero_variance="refill"',
        tokens=uneven,
        outcome=lambda a: 1.0 if a.draw % 3 == 0 else float(a.member % 2),
    )
    refunded = dropped_draws(pipeline, "zero_variance")
    assert refunded
    assert committed(pipeline) == sorted([*pipeline.draws_consumed(), *refunded])


@pytest.mark.parametrize("consume", ["drop", "requeue"])
def test_a_stale_draw_comes_again_under_requeue_and_not_under_drop(tmp_path: Path, consume: str):
    pipeline = finished(
        tmp_path,
        f"schedule.consume={consume}",
        "schedule.staleness=1",
        "engine.slots=12",
        "train.steps=12",
        tokens=lambda a: 40 if a.draw % 4 == 0 and not a.round else 3,
    )
    stale = dropped_draws(pipeline, "stale")
    again = set(stale) & set(pipeline.draws_consumed())
    assert stale
    if consume == "drop":
        assert not again
        assert committed(pipeline) == sorted([*pipeline.draws_consumed(), *stale])
    else:
        assert again
        assert committed(pipeline) == sorted(pipeline.draws_consumed())


# ---- failures of attempts ------------------------------------------------------------------------


def test_crashed_members_are_retried_and_then_the_group_is_trained_without_them(tmp_path: Path):
    """L4: of 8 members 2 crash in both their attempts."""
    pipeline = finished(
        tmp_path,
        "train.samples_per_group=8",
        "train.groups_per_step=1",
        "train.steps=3",
        "schedule.staleness=0",
        "schedule.retries=1",
        tokens=uneven,
        outcome=lambda a: (
            CRASH if (a.draw, a.round) == (0, 0) and a.member in (2, 5) else float(a.member % 2)
        ),
    )
    close = pipeline.events("close")[0]
    assert (close.group, close.payload["reason"]) == (0, "partial")
    survivors = [f"g000000-{member:02d}-0" for member in (0, 1, 3, 4, 6, 7)]
    assert close.payload["survivors"] == survivors
    assert [item.episode for item in pipeline.learner.consumed[0]] == survivors

    crashed = [f"g000000-{member:02d}-{attempt}" for member in (2, 5) for attempt in (0, 1)]
    finishes = {event.episode: event.payload for event in pipeline.events("finish")}
    for episode in crashed:
        assert (finishes[episode]["status"], finishes[episode]["reward"]) == ("failed", None)
        assert finishes[episode]["failure"] == ["environment", "worker_lost", "the worker died"]
    failed = [d for d in pipeline.learner.discarded if d.reason == "failed: environment"]
    assert sorted(item.episode for item in failed) == crashed

    # the task comes again, as another round of the same draw, and before any further draw
    closes = [(e.group, e.payload["stream"], e.payload["task"]) for e in pipeline.events("close")]
    assert [draw for _, draw, _ in closes] == [0, 0, 1]
    assert closes[0][2] == closes[1][2]
    assert len(pipeline.learner.consumed[1]) == 8


def test_a_member_that_recovers_within_its_budget_is_a_member_like_any_other(tmp_path: Path):
    pipeline = finished(
        tmp_path,
        "schedule.retries=2",
        outcome=lambda a: CRASH if a.member == 1 and a.attempt < 2 else float(a.member),
    )
    assert {e.payload["reason"] for e in pipeline.events("close")} == {"complete"}
    assert all(
        item.episode.endswith(("00-0", "01-2"))
        for items in pipeline.learner.consumed.values()
        for item in items
    )


def test_a_group_with_too_few_survivors_is_dropped_and_its_task_comes_again(tmp_path: Path):
    pipeline = finished(
        tmp_path,
        "schedule.retries=0",
        "schedule.min_survivors=2",
        outcome=lambda a: CRASH if (a.draw, a.round, a.member) == (1, 0, 0) else float(a.member),
    )
    (drop,) = (e for e in pipeline.events("drop") if e.payload["reason"] == "failed")
    assert Counter(pipeline.draws_consumed())[1] == 1
    left_out = {item.episode: item.reason for item in pipeline.learner.discarded}
    assert left_out[f"g{drop.group:06d}-01-0"] == "failed"
    assert left_out[f"g{drop.group:06d}-00-0"] == "failed: environment"


def test_a_stuck_member_is_withdrawn_when_its_group_is_due(tmp_path: Path):
    """L5"""
    pipeline = finished(
        tmp_path,
        "schedule.timeout_s=50.0",
        "train.samples_per_group=3",
        tokens=lambda a: 10**6 if (a.draw, a.round, a.member) == (0, 0, 2) else 3,
    )
    (timeout,) = (e for e in pipeline.events("close") if e.payload["reason"] == "timeout")
    assert timeout.payload["survivors"] == ["g000000-00-0", "g000000-01-0"]
    (stuck,) = (e for e in pipeline.events("finish") if e.episode == "g000000-02-0")
    assert stuck.payload["status"] == EpisodeStatus.ABORTED
    assert stuck.payload["reward"] is None
    assert stuck.payload["action_tokens"] == pytest.approx(50, abs=2)
    assert Counter(pipeline.draws_consumed())[0] == 2, "its task came again"


def test_a_group_that_is_due_without_survivors_is_dropped_and_comes_again(tmp_path: Path):
    pipeline = finished(
        tmp_path,
        "schedule.timeout_s=50.0",
        tokens=lambda a: 10**6 if (a.draw, a.round) == (0, 0) else 3,
    )
    (drop,) = (e for e in pipeline.events("drop") if e.payload["reason"] == "timeout")
    assert drop.payload["episodes"] == ["g000000-00-0", "g000000-01-0"]
    assert Counter(pipeline.draws_consumed())[0] == 1


def test_a_member_that_ends_well_after_its_group_closed_is_left_out_as_late(tmp_path: Path):
    """Its world acts too long; its group waits for a trainer that is busy meanwhile."""
    slow = Attempt(0, 0, 2, 0)
    pipeline = Pipeline(
        tmp_path,
        ("schedule.timeout_s=50.0", "train.samples_per_group=3", "engine.slots=24"),
        world_s=lambda attempt: 60.0 if attempt == slow else 0.0,
    )
    pipeline.learner.train_s = 200.0
    assert pipeline.play() == "done"
    proven(pipeline)
    order = [(e.kind, e.group) for e in pipeline.events("close", "claim") if e.group == 0]
    (finish,) = (e for e in pipeline.events("finish") if e.episode == "g000000-02-0")
    (claim,) = (e for e in pipeline.events("claim") if e.group == 0)
    assert order == [("close", 0), ("claim", 0)]
    assert finish.seq < claim.seq
    assert (finish.payload["status"], finish.payload["reward"]) == ("done", 0.0)
    assert claim.payload["episodes"] == ["g000000-00-0", "g000000-01-0"]
    left_out = {item.episode: item.reason for item in pipeline.learner.discarded}
    assert left_out["g000000-02-0"] == "late"


def test_the_noise_of_an_attempt_is_keyed_by_its_draw_and_not_by_its_group(tmp_path: Path):
    pipeline = finished(
        tmp_path,
        "schedule.retries=0",
        "schedule.min_survivors=2",
        "seed=5",
        outcome=lambda a: CRASH if (a.draw, a.round) == (1, 0) else float(a.member),
    )
    draws = {event.group: event.payload["stream"] for event in pipeline.events("close")}
    assert any(group != draw for group, draw in draws.items())
    closed = [spec for spec in pipeline.specs if spec.group in draws]
    assert {(spec.key[0], spec.key[1]) for spec in closed} == {(5, d) for d in draws.values()}
    assert all(spec.key[1] == draws[spec.group] for spec in closed)
    assert len({spec.key for spec in pipeline.specs}) == len(pipeline.specs)


# ---- ends ----------------------------------------------------------------------------------------


def interrupt_at(step: int):
    def on_step(pipeline: Pipeline, progress: object) -> None:
        if pipeline.progress[-1].step == step:
            pipeline.controller.interrupt("SIGINT")
            pipeline.controller.interrupt("SIGTERM")

    return on_step


def test_an_interrupted_run_checkpoints_once_and_gives_up_what_is_in_flight(tmp_path: Path):
    pipeline = Pipeline(
        tmp_path,
        ("schedule.staleness=2", "eval.samples=1"),
        tokens=uneven,
        on_step=interrupt_at(2),
    )
    assert pipeline.play() == "interrupted"
    proven(pipeline)
    assert list(pipeline.learner.checkpoints) == [2]
    (end,) = pipeline.events("run_end")
    assert end.payload == {"reason": "interrupted", "message": "SIGINT"}
    issued = {event.episode for event in pipeline.events("issue")}
    assert issued == {event.episode for event in pipeline.events("finish")}
    dropped = [e for e in pipeline.events("drop") if e.payload["reason"] == "run_end"]
    assert dropped
    trained = {i.episode for items in pipeline.learner.consumed.values() for i in items}
    assert trained.isdisjoint(item.episode for item in pipeline.learner.discarded)
    assert trained | {item.episode for item in pipeline.learner.discarded} == issued
    assert [e.payload["step"] for e in pipeline.events("eval")] == [0], "none at its end"


def test_an_interrupt_waits_for_the_step_in_progress_and_counts_it(tmp_path: Path):
    def on_step(pipeline: Pipeline, progress: object) -> None:
        if len(pipeline.progress) == 2:
            loop = asyncio.get_running_loop()
            loop.call_later(4.0, lambda: pipeline.controller.interrupt("SIGINT"))

    pipeline = Pipeline(
        tmp_path, ("schedule.staleness=2",), on_step=on_step, tokens=lambda attempt: 1
    )
    assert pipeline.play() == "interrupted"
    proven(pipeline)
    assert [e.payload["step"] for e in pipeline.events("commit")] == [0, 1, 2]
    assert list(pipeline.learner.checkpoints) == [3]
    assert len(pipeline.progress) == 3


def test_an_interrupt_waits_for_the_sync_in_progress(tmp_path: Path):
    def on_step(pipeline: Pipeline, progress: object) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.2, lambda: pipeline.controller.interrupt("SIGINT"))

    pipeline = Pipeline(tmp_path, ("schedule.staleness=2",), on_step=on_step)
    assert pipeline.play() == "interrupted"
    proven(pipeline)
    assert [event.version for event in pipeline.events("apply")] == [0, 1]


def test_every_draw_is_trained_once_over_two_interrupts(tmp_path: Path):
    """L1: groups of several steps are in flight and in the buffer at each checkpoint."""
    overrides = ("schedule.staleness=2", "train.steps=9")
    pipeline = Pipeline(tmp_path, overrides, tokens=uneven, on_step=interrupt_at(3))
    assert pipeline.play() == "interrupted"
    pipeline = pipeline.resumed(3, on_step=interrupt_at(6))
    assert pipeline.play() == "interrupted"
    pipeline = pipeline.resumed(6)
    assert pipeline.play() == "done"
    proven(pipeline)
    draws = pipeline.draws_consumed()
    assert len(draws) == 18
    assert max(Counter(draws).values()) == 1
    assert committed(pipeline) == sorted(draws)


def test_checkpoints_are_written_at_their_steps_and_at_the_end(tmp_path: Path):
    pipeline = finished(
        tmp_path, "checkpoint.every=2", "train.steps=5", "schedule.staleness=1", tokens=uneven
    )
    assert list(pipeline.learner.checkpoints) == [2, 4, 5]
    for step, state in pipeline.learner.checkpoints.items():
        assert (state["step"], state["version"]) == (step, step)
        trained = state["stream"]["low_water"] + len(state["stream"]["committed"])
        assert trained == 2 * step
    assert [(e.kind, e.payload["step"]) for e in pipeline.events("checkpoint")] == [
        ("checkpoint", 2),
        ("checkpoint", 4),
        ("checkpoint", 5),
    ]


def fails_at(step: int, error: Exception):
    return lambda at: error if at == step else None


def test_a_fault_of_the_learner_stops_the_run_with_its_cause_in_the_ledger(tmp_path: Path):
    pipeline = Pipeline(tmp_path, ("schedule.staleness=2",), tokens=uneven)
    pipeline.learner.fault = fails_at(2, TrainerFault("out of memory", field="trainer"))
    with pytest.raises(TrainerFault, match="out of memory"):
        pipeline.play()
    (end,) = pipeline.events("run_end")
    assert (end.version, end.payload) == (2, {"reason": "fault", "message": "out of memory"})
    assert pipeline.learner.checkpoints == {}
    assert [e.version for e in pipeline.events("commit")] == [1, 2]
    proven(pipeline)


def test_a_version_that_does_not_arrive_whole_stops_the_run(tmp_path: Path):
    pipeline = Pipeline(tmp_path, verify=refuse(2))
    with pytest.raises(TransportFault, match="version 2"):
        pipeline.play()
    (end,) = pipeline.events("run_end")
    assert end.payload["reason"] == "fault"
    assert [event.version for event in pipeline.events("apply")] == [0, 1]
    proven(pipeline)


def test_the_first_of_several_causes_is_raised(tmp_path: Path):
    def on_step(pipeline: Pipeline, progress: object) -> None:
        pipeline.controller.fail(Fault("engine-0 is gone"))
        pipeline.controller.fail(TrainerFault("the learner is gone, too"))

    pipeline = Pipeline(tmp_path, on_step=on_step)
    with pytest.raises(Fault, match="engine-0 is gone"):
        pipeline.play()
    assert len(pipeline.progress) == 1


def test_a_fault_before_the_first_step_is_raised_and_recorded(tmp_path: Path):
    pipeline = Pipeline(tmp_path, verify=refuse(0))
    with pytest.raises(TransportFault):
        pipeline.play()
    assert [event.kind for event in pipeline.events()] == ["run_start", "publish", "run_end"]


def test_an_error_that_nobody_foresaw_stops_the_run_as_well(tmp_path: Path):
    pipeline = Pipeline(tmp_path)
    pipeline.learner.fault = fails_at(1, ZeroDivisionError("a bug"))
    with pytest.raises(Fault, match="a bug") as caught:
        pipeline.play()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    (end,) = pipeline.events("run_end")
    assert "a bug" in end.payload["message"]


def test_a_run_whose_attempts_all_fail_ends_with_the_cause_of_the_last(tmp_path: Path):
    pipeline = Pipeline(tmp_path, outcome=lambda attempt: CRASH)
    with pytest.raises(Fault, match=r"16 attempts failed in a row.*the worker died"):
        pipeline.play()
    assert len(pipeline.events("finish")) == 16
    assert pipeline.events("commit") == []


def test_attempts_that_end_well_now_and_then_keep_a_run_alive(tmp_path: Path):
    pipeline = finished(
        tmp_path,
        "schedule.retries=6",
        "schedule.staleness=0",
        outcome=lambda a: CRASH if a.attempt < 6 and a.draw % 2 else float(a.member),
        tokens=lambda a: 3 if a.draw % 2 else 7,
    )
    assert sum(e.payload["status"] == "failed" for e in pipeline.events("finish")) >= 60


# ---- steps that learn nothing --------------------------------------------------------------------


def test_a_step_that_learns_nothing_uses_up_its_number_and_makes_no_version(tmp_path: Path):
    pipeline = Pipeline(tmp_path, ("schedule.staleness=1",), tokens=uneven)
    pipeline.learner.learns = lambda step: step != 2
    assert pipeline.play() == "done"
    proven(pipeline)
    assert [(e.payload["step"], e.version) for e in pipeline.events("train")] == [
        *((0, 1), (1, 2), (2, 2), (3, 3), (4, 4), (5, 5))
    ]
    assert [e.version for e in pipeline.events("commit")] == [1, 2, 3, 4, 5]
    (skip,) = pipeline.events("skip")
    assert skip.payload["step"] == 2
    assert len(skip.payload["episodes"]) == 4
    assert [e.version for e in pipeline.events("publish")] == [0, 1, 2, 3, 4, 5]
    assert len(set(pipeline.draws_consumed())) == 12, "what taught nothing does not come again"


def test_a_run_that_never_learns_still_ends(tmp_path: Path):
    pipeline = Pipeline(tmp_path, ("schedule.staleness=2",))
    pipeline.learner.learns = lambda step: False
    assert pipeline.play() == "done"
    proven(pipeline)
    assert pipeline.events("commit") == []
    assert len(pipeline.events("skip")) == 6
    assert list(pipeline.learner.checkpoints) == [6]


# ---- evaluation ----------------------------------------------------------------------------------


def test_the_held_out_tasks_are_sampled_before_every_n_steps_and_after(tmp_path: Path):
    pipeline = finished(
        tmp_path,
        "eval.samples=2",
        "eval.every=2",
        "train.steps=5",
        "eval.temperature=0.5",
        "engine.count=2",
        outcome=lambda a: 1.0 if a.draw % 2 else 0.0,
    )
    evaluations = pipeline.events("eval")
    assert [(e.payload["step"], e.version) for e in evaluations] == [(0, 0), (2, 2), (4, 4), (5, 5)]
    assert all((e.payload["episodes"], e.payload["failed"]) == (6, 0) for e in evaluations)
    assert len(pipeline.evaluated) == 4 * 6
    assert {spec.temperature for spec in pipeline.evaluated} == {0.5}
    assert {spec.task.split for spec in pipeline.evaluated} == {"heldout"}
    assert {spec.engine for spec in pipeline.evaluated} == {0, 1}
    assert len({spec.id for spec in pipeline.evaluated}) == 4 * 6
    # tasks 0 and 2 of three have even keys or odd ones: two thirds or one third pass
    assert {e.payload["heldout_pass_rate"] for e in evaluations} <= {1 / 3, 2 / 3}
    for event in evaluations:
        by_task = event.payload["by_task"]
        assert len({task for task, _, _ in by_task}) == 3
        assert {(passed, episodes) for _, passed, episodes in by_task} == {(0, 2), (2, 2)}
        assert sum(passed for _, passed, _ in by_task) == event.payload["passed"]


def test_an_evaluation_repeats_its_noise_and_shares_none_with_training(tmp_path: Path):
    pipeline = finished(tmp_path, "eval.samples=2", "train.steps=2")
    half = len(pipeline.evaluated) // 2
    before, after = pipeline.evaluated[:half], pipeline.evaluated[half:]
    assert [spec.key for spec in before] == [spec.key for spec in after]
    assert len({spec.key for spec in before}) == half
    assert min(spec.key[1] for spec in before) > 10**9


def test_evaluation_episodes_are_no_part_of_the_training_records(tmp_path: Path):
    pipeline = finished(tmp_path, "eval.samples=2")
    issued = {event.episode for event in pipeline.events("issue")}
    assert issued.isdisjoint(spec.id for spec in pipeline.evaluated)
    assert not any(path.is_file() for path in (pipeline.run.path / "payload").iterdir())


def test_what_fails_in_an_evaluation_is_counted_apart_and_never_as_a_miss(tmp_path: Path):
    pipeline = finished(
        tmp_path,
        "eval.samples=2",
        "train.steps=1",
        outcome=lambda a: CRASH if a.draw > 10**9 and a.member else 1.0 - a.member,
    )
    for event in pipeline.events("eval"):
        assert event.payload["heldout_pass_rate"] == 1.0
        assert (event.payload["episodes"], event.payload["failed"]) == (3, 3)


def test_no_samples_is_no_evaluation(tmp_path: Path):
    pipeline = finished(tmp_path, "eval.samples=0")
    assert pipeline.events("eval") == []
    assert pipeline.evaluated == []


# ---- what is told and kept -----------------------------------------------------------------------


def test_versions_are_retired_once_the_last_engine_has_left_them(tmp_path: Path):
    pipeline = finished(tmp_path, "engine.count=2", load_s=(0.1, 0.9))
    # per version once for the quick engine and once for the slow one; the last is never synced
    assert pipeline.learner.retired == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]


def test_watchers_are_told_the_figures_of_every_step(tmp_path: Path):
    pipeline = Pipeline(tmp_path)
    pipeline.learner.metrics = (
        MetricValue(name="episode/reward", sum=3.0, count=4, min=0.0, max=1.0),
        MetricValue(name="gap/lag", sum=6.0, count=12, min=0.0, max=2.0),
        MetricValue(name="gap/abs_log_ratio", sum=0.0, count=0, min=0.0, max=0.0),
    )
    assert pipeline.play() == "done"
    assert [(p.step, p.version) for p in pipeline.progress] == [(i, i) for i in range(1, 7)]
    last = pipeline.progress[-1]
    assert (last.reward, last.mean_lag, last.max_lag) == (0.75, 0.5, 2)
    assert (last.mean_abs_gap, last.ess) == (None, None), "there is nothing to tell"


def test_no_payload_is_left_when_a_run_is_done(tmp_path: Path):
    pipeline = finished(tmp_path, "schedule.staleness=2", tokens=uneven)
    assert list((pipeline.run.path / "payload").iterdir()) == []


def test_tasks_are_drawn_without_gaps_over_epochs(tmp_path: Path):
    pipeline = finished(tmp_path, "schedule.staleness=0", "train.steps=7", tokens=uneven)
    tasks = [event.payload["task"] for event in pipeline.events("close")]
    draws = [event.payload["stream"] for event in pipeline.events("close")]
    by_draw = dict(zip(draws, tasks, strict=True))
    assert sorted(draws) == list(range(14))
    for epoch in (range(7), range(7, 14)):
        assert sorted(by_draw[draw] for draw in epoch) == [f"t{i}" for i in range(7)]
