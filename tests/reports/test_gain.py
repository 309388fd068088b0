import pytest

from trueup.reports.gain import paired_gain


def evaluation(*passed: int, of: int = 1) -> dict[str, object]:
    return {"by_task": [[f"t{i}", n, of] for i, n in enumerate(passed)]}


def test_a_gain_of_every_task_has_an_interval_without_width() -> None:
    gain = paired_gain(evaluation(0, 1, 2, of=4), evaluation(1, 2, 3, of=4))
    assert gain is not None
    assert (gain.mean, gain.low, gain.high, gain.tasks) == (0.25, 0.25, 0.25, 3)
    assert str(gain) == "+0.25 (95 % interval +0.25 to +0.25, 3 tasks)"


def test_the_interval_is_that_of_the_mean_of_paired_differences() -> None:
    """100 of 400 tasks gain, 40 lose: mean .15, standard error √((140/400 − .15²)/400) = .0286.

    Percentiles of 2,000 resamples are within about .003 of ±1.96 standard errors.
    """
    before = evaluation(*[0] * 100, *[1] * 40, *[1] * 130, *[0] * 130)
    after = evaluation(*[1] * 100, *[0] * 40, *[1] * 130, *[0] * 130)
    gain = paired_gain(before, after)
    assert gain is not None
    assert gain.mean == pytest.approx(0.15)
    assert gain.low == pytest.approx(0.15 - 0.0561, abs=0.006)
    assert gain.high == pytest.approx(0.15 + 0.0561, abs=0.006)


def test_only_tasks_of_both_evaluations_count() -> None:
    gain = paired_gain(evaluation(0, 0), {"by_task": [["t1", 1, 1], ["t9", 0, 1]]})
    assert gain is not None
    assert (gain.mean, gain.tasks) == (1.0, 1)


def test_without_common_tasks_there_is_no_gain() -> None:
    assert paired_gain(evaluation(1), {"by_task": []}) is None
    assert paired_gain({"heldout_pass_rate": 0.5}, evaluation(1)) is None
