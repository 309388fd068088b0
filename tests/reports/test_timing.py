"""Edges of the time arithmetic that a whole run does not show."""

import pytest

from trueup.reports.run import read_run
from trueup.reports.timing import overlap_share, periods, waits


def train(run, step, t0, t1):
    run.add(t1, "train", version=step + 1, step=step, t0=t0, t1=t1, phases={})


def test_decoding_in_another_session_does_not_overlap(writer):
    run = writer()
    train(run, 0, 1.0, 2.0)
    # After the restart the clock runs through the same seconds again.
    run.add(0, "resume", version=1, step=1, path="", skipped=[])
    run.add(2, "activity", engine="engine-0", stretches=[[1.0, 2.0, 9, 0, 1]])
    assert overlap_share(read_run(run.close()).history) == 0


def test_two_engines_that_decode_at_once_count_once(writer):
    run = writer()
    train(run, 0, 0.0, 4.0)
    run.add(4, "activity", engine="engine-0", stretches=[[0.0, 2.0, 9, 0, 1]])
    run.add(4, "activity", engine="engine-1", stretches=[[1.0, 3.0, 9, 0, 1]])
    assert overlap_share(read_run(run.close()).history) == pytest.approx(3 / 4)


def test_engine_shares_are_means_over_engines(writer):
    run = writer()
    train(run, 0, 0.0, 4.0)
    train(run, 1, 4.0, 10.0)
    run.add(10, "activity", engine="engine-0", stretches=[[0.0, 10.0, 9, 0, 1]])
    run.add(10, "activity", engine="engine-1", stretches=[[0.0, 5.0, 9, 0, 1]])
    found = waits(read_run(run.close()).history)
    assert found is not None
    assert found.engine_decoding == pytest.approx(0.75)
    assert found.engine_idle == pytest.approx(0.25)
    assert found.trainer_waiting == 0
    assert found.verdict == "the engines wait"


def test_a_publication_within_the_step_is_not_subtracted_twice(writer):
    run = writer()
    train(run, 0, 0.0, 4.0)
    run.add(4, "publish", version=1, digest="", nbytes=1, n_changed=1, t0=3.5, t1=4.5)
    train(run, 1, 6.0, 9.0)
    (period,) = periods(read_run(run.close()).history)
    assert (period.training, period.publishing, period.waiting) == (3.0, 0.5, 1.5)


def test_without_a_second_step_nobody_waited(writer):
    run = writer()
    train(run, 0, 0.0, 4.0)
    assert waits(read_run(run.close()).history) is None
