"""Numbers of hand-written runs, worked out by hand."""

import pytest

from trueup.errors import RunDirectoryError
from trueup.reports.summary import summarise

KEYS = [
    *("run", "steps", "base_pass_rate", "heldout_pass_rate"),
    *("gain", "gain_low", "gain_high", "reads_per_episode"),
    *("episodes_launched", "episodes_trained", "episodes_per_s"),
    *("mean_token_lag", "max_token_lag", "wall_s"),
]


def two_steps(run):
    """Two steps of two episodes; b spans two versions, x fails once and is tried again."""
    run.add(0, "run_start", config_digest="", schedule={})
    before = {"heldout_pass_rate": 0.25, "by_task": [["h", 1, 4]]}
    run.add(1, "eval", version=0, step=0, reads_per_episode=0.5, **before)
    run.issue(2, "a", group=0, member=0)
    run.issue(2, "b", group=0, member=1)
    run.issue(2, "x", group=1, member=0)
    failure = ["environment", "worker_lost", ""]
    run.finish(3, "x", group=1, spans=[], reward=None, status="failed", failure=failure)
    run.issue(3, "x", group=1, member=0, attempt=1)
    run.issue(3, "d", group=1, member=1)
    run.finish(4, "a", spans=[[0, "engine-0", 0, 4]], reward=1.0)
    run.finish(5, "b", spans=[[0, "engine-0", 0, 2]], reward=0.0)
    run.add(5, "claim", group=0, version=0, step=0, episodes=["a", "b"])
    run.add(7, "train", version=0, step=0, t0=5.0, t1=7.0, phases={"score": 0.5, "update": 1.0})
    run.add(7, "commit", version=1, step=0, episodes=["a", "b"])
    run.add(7.5, "publish", version=1, digest="d1", nbytes=1, n_changed=1, t0=7.0, t1=7.5)
    run.add(8, "apply", engine="engine-0", version=1, t_start=7.5, t_end=8.0, digest="d1")
    # x sampled 1 token with version 0 and 3 with version 1; the step starts at version 1.
    run.finish(
        9, "x", group=1, attempt=1, reward=1.0, spans=[[0, "engine-0", 0, 1], [1, "engine-0", 0, 3]]
    )
    run.finish(9, "d", group=1, spans=[[0, "engine-0", 0, 2]], reward=0.0)
    run.add(9, "claim", group=1, version=1, step=1, episodes=["x", "d"])
    run.add(9, "drop", group=7, version=1, reason="stale", episodes=["s", "t", "u"])
    run.add(12, "train", version=1, step=1, t0=9.0, t1=12.0, phases={"score": 1.5, "update": 1.0})
    run.add(12, "commit", version=2, step=1, episodes=["x", "d"])
    # Decoding 2-6 and 10-11 lies within training for 1 + 1 s; 6-7 only prefills.
    run.add(
        12,
        "activity",
        engine="engine-0",
        stretches=[
            [2.0, 4.0, 9, 9, 3],
            [3.0, 6.0, 9, 0, 3],
            [6.0, 7.0, 0, 5, 1],
            [10.0, 11.0, 5, 0, 1],
        ],
    )
    after = {"heldout_pass_rate": 0.75, "by_task": [["h", 3, 4]]}
    run.add(14, "eval", version=2, step=2, reads_per_episode=1.5, **after)


@pytest.fixture
def finished(writer):
    run = writer()
    two_steps(run)
    run.add(15, "run_end", version=2, reason="done", message="")
    return run.close()


def test_the_json_object_holds_exactly_the_promised_keys(finished):
    assert list(summarise(finished).as_json()) == KEYS


def test_figures_of_a_run_worked_out_by_hand(finished):
    found = summarise(finished)
    assert found.as_json() == {
        "run": "demo",
        "steps": 2,
        "base_pass_rate": 0.25,
        "heldout_pass_rate": 0.75,
        "gain": 0.5,  # of the one held-out task, so without width
        "gain_low": 0.5,
        "gain_high": 0.5,
        "reads_per_episode": 1.5,
        "episodes_launched": 5,
        "episodes_trained": 4,
        "episodes_per_s": 0.4,  # 4 episodes from the first issue at 2 s to the last commit at 12 s
        "mean_token_lag": 3 / 12,  # 6 tokens at lag 0; of 6 in step 1, 1 + 2 at lag 1 and 3 at 0
        "max_token_lag": 1,
        "wall_s": 15.0,
    }
    assert found.lag_tokens == {0: 9, 1: 3}
    assert found.base_reads_per_episode == 0.5
    assert found.ended == "done"


def test_failures_drops_and_retries_are_counted_by_reason(finished):
    found = summarise(finished)
    assert found.failures == {"environment/worker_lost": 1}
    assert found.drops == {"stale": 3}
    assert found.retries == 1


def test_overlap_is_decoding_within_training(finished):
    assert summarise(finished).overlap == pytest.approx(2 / 5)


def test_phases_are_closed_by_an_other(finished):
    phases = summarise(finished).phases
    assert phases["score"] == (pytest.approx(1.0), pytest.approx(2 / 5))
    assert phases["update"] == (pytest.approx(1.0), pytest.approx(2 / 5))
    assert phases["other"] == (pytest.approx(0.5), pytest.approx(1 / 5))


def test_waits_split_the_time_between_two_steps(finished):
    waits = summarise(finished).waits
    assert waits is not None
    # From 7 to 12: published .5, waited 1.5, trained 3.
    assert waits.trainer_training == pytest.approx(3 / 5)
    assert waits.trainer_publishing == pytest.approx(0.5 / 5)
    assert waits.trainer_waiting == pytest.approx(1.5 / 5)
    assert waits.trainer_evaluating == 0
    # From 5 to 12: decoded 5-6 and 10-11, prefilled 6-7, loaded 7.5-8, nothing in 3.5 s.
    assert waits.engine_decoding == pytest.approx(2 / 7)
    assert waits.engine_loading == pytest.approx(0.5 / 7)
    assert waits.engine_idle == pytest.approx(3.5 / 7)
    assert waits.verdict == "the engines wait"


def test_a_gap_with_an_evaluation_is_not_waiting(writer):
    run = writer()
    two_steps(run)
    run.add(20, "eval", version=2, step=2, heldout_pass_rate=0.5, reads_per_episode=1.0)
    run.add(24, "train", version=2, step=2, t0=20.0, t1=24.0, phases={})
    waits = summarise(run.close()).waits
    assert waits is not None
    assert waits.trainer_evaluating == pytest.approx(8 / 17)


def test_a_killed_run_is_summarised_up_to_its_last_event(writer):
    run = writer()
    two_steps(run)
    found = summarise(run.close())
    assert found.ended == "unfinished"
    assert found.steps == 2
    assert found.wall_s == 14.0


def test_a_resume_voids_the_steps_beyond_its_checkpoint(writer):
    run = writer()
    two_steps(run)
    # Back to version 1, on a machine whose monotonic clock started anew.
    run.add(0.5, "resume", version=1, step=1, path="", skipped=[])
    run.issue(1, "e", group=2, version=1)
    run.finish(2, "e", group=2, spans=[[1, "engine-0", 1, 5]], reward=1.0)
    run.add(2, "claim", group=2, version=1, step=1, episodes=["e"])
    run.add(3, "train", version=1, step=1, t0=2.0, t1=3.0, phases={})
    run.add(3, "commit", version=2, step=1, episodes=["e"])
    found = summarise(run.close())
    assert found.steps == 2
    assert found.episodes_trained == 3  # a, b of the first life, e of the second
    assert found.max_token_lag == 0
    assert found.wall_s == pytest.approx(14.0 + 2.5)
    assert found.episodes_launched == 6


def test_a_run_without_events_or_ledger_has_no_figures(writer, tmp_path):
    empty = writer("empty").close()
    bare = tmp_path / "bare"
    bare.mkdir()
    for found in (summarise(empty), summarise(bare)):
        values = found.as_json()
        assert [key for key in KEYS if values[key] is None] == [
            *("base_pass_rate", "heldout_pass_rate", "gain", "gain_low", "gain_high"),
            *("reads_per_episode", "episodes_per_s"),
            *("mean_token_lag", "max_token_lag"),
        ]
        assert values["steps"] == values["episodes_trained"] == values["wall_s"] == 0
        assert found.overlap is None
        assert found.waits is None
        assert found.ended == "unfinished"


def test_without_an_evaluation_the_pass_rates_are_unknown(writer):
    run = writer()
    run.issue(0, "a")
    run.finish(1, "a", spans=[[0, "engine-0", 0, 4]], reward=1.0)
    run.add(1, "claim", group=0, version=0, step=0, episodes=["a"])
    run.add(2, "train", version=0, step=0, t0=1.0, t1=2.0, phases={})
    run.add(2, "commit", version=1, step=0, episodes=["a"])
    found = summarise(run.close())
    assert found.base_pass_rate is None
    assert found.heldout_pass_rate is None
    assert found.episodes_per_s == 0.5


def test_held_out_episodes_are_not_launched_training_episodes(writer):
    run = writer()
    run.issue(0, "h", split="heldout")
    run.issue(0, "a")
    assert summarise(run.close()).episodes_launched == 1


def test_what_is_no_directory_is_refused(tmp_path):
    with pytest.raises(RunDirectoryError, match="existing directory"):
        summarise(tmp_path / "nothing")


def test_before_a_second_evaluation_only_the_base_is_known(writer):
    run = writer()
    run.add(1, "eval", version=0, step=0, heldout_pass_rate=0.25, reads_per_episode=0.5)
    found = summarise(run.close())
    assert (found.base_pass_rate, found.heldout_pass_rate) == (0.25, None)
    assert (found.base_reads_per_episode, found.reads_per_episode) == (0.5, None)


def test_a_delayed_engine_that_still_serves_the_base_does_not_make_a_base(writer):
    run = writer()
    two_steps(run)
    run.add(16, "eval", version=0, step=2, heldout_pass_rate=0.3, reads_per_episode=0.5)
    found = summarise(run.close())
    assert (found.base_pass_rate, found.heldout_pass_rate) == (0.25, 0.3)


def test_an_evaluation_of_a_step_that_was_rolled_back_does_not_count(writer):
    run = writer()
    two_steps(run)
    run.add(0.5, "resume", version=1, step=1, path="", skipped=[])
    assert summarise(run.close()).heldout_pass_rate is None


def test_a_step_without_contrast_is_consumed_but_trains_nothing(writer):
    run = writer()
    run.issue(0, "a")
    run.finish(1, "a", spans=[[0, "engine-0", 0, 4]], reward=1.0)
    run.add(1, "claim", group=0, version=2, step=5, episodes=["a"])
    run.add(2, "train", version=2, step=5, t0=1.0, t1=2.0, phases={})
    run.add(2, "drop", group=0, version=2, reason="no_contrast", episodes=["a"])
    found = summarise(run.close())
    assert (found.steps, found.episodes_trained, found.max_token_lag) == (1, 0, 2)
    assert found.drops == {"no_contrast": 1}
