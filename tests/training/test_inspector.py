"""Receipts and probes written by hand, and a trainer that gives every token the same score."""

import math
from dataclasses import replace

import pytest
import torch

from support.episodes import episode, segment, span
from trueup.training.inspector import Inspector, measure
from trueup.training.messages import ProbeReport
from trueup.types import Episode, LoadReceipt, WeightManifest

RECEIPT = LoadReceipt(
    engine="e", epoch=0, version=1, digest="d1", t_start=0, t_staged=0, t_end=0, tokens_recomputed=0
)


def score(batch, version):
    """log π is −1 under version 1 and −2 under version 2; version 0 is not kept."""
    return None if version == 0 else torch.full((len(batch.action_index),), -float(version))


def probe(*logps: float, version: int = 1, precision: str = "float32") -> tuple[Episode, ...]:
    """Two sequences of the same log-probs."""
    n = len(logps)
    part = segment(
        [1] * (n + 1),
        [0] + [1] * n,
        logps=logps,
        spans=[replace(span(0, n, version=version), precision=precision)],
    )
    counters = {"prompt": 4, "cached": 3}
    return tuple(episode(name, part, counters=counters) for name in ("a", "b"))


def inspector(*, learns: bool = True) -> Inspector:
    found = Inspector(score, lambda batch, grid: score(batch, 1), trained="float32", learns=learns)
    found.published(
        WeightManifest(
            version=1,
            transport="none",
            location="",
            digest="d1",
            tensors=(),
            nbytes=0,
            n_changed=1,
        )
    )
    return found


def names(report: ProbeReport) -> list[str]:
    return [name for name, _ in report.alarms]


def test_a_probe_is_scored_under_the_version_it_claims():
    found = measure(probe(-1.5, -1.0), score, newest=2)
    assert found.reading is not None
    assert found.reading.mean == pytest.approx(0.25)
    assert (found.tokens, found.unknown, found.cached) == (4, 0, 0.75)
    later = measure(probe(-1.5, -1.0, version=2), score, newest=2)
    assert later.reading is not None
    assert later.reading.mean == pytest.approx(0.75)


def test_what_is_too_old_to_score_is_no_alarm_and_what_is_too_new_is_one():
    judge = inspector()
    old = judge(RECEIPT, probe(-1.0, version=0), newest=2)
    assert (old.tokens, old.mean, names(old)) == (2, None, [])
    assert names(judge(RECEIPT, probe(-1.0, version=3), newest=2)) == ["probe_known"]
    assert names(judge(RECEIPT, probe(math.nan, -1.0), newest=2)) == ["probe_known"]


def test_the_first_load_is_the_floor_of_the_next():
    judge = inspector()
    first = judge(RECEIPT, probe(-1.001, -1.002), newest=1)
    assert (first.floor, first.limit, names(first)) == (None, 0.01, [])
    second = judge(RECEIPT, probe(-1.004, -1.005), newest=1)
    assert second.floor == pytest.approx(0.0015, rel=1e-3)
    assert second.limit == pytest.approx(0.00225, rel=1e-3)
    assert names(second) == ["probe"]
    third = judge(RECEIPT, probe(-1.001, -1.002), newest=1)
    assert third.floor == pytest.approx(0.0015, rel=1e-3)


def test_an_engine_that_was_started_again_has_a_floor_of_its_own():
    judge = inspector()
    judge(RECEIPT, probe(-1.001, -1.002), newest=1)
    again = judge(replace(RECEIPT, epoch=1), probe(-1.004, -1.005), newest=1)
    assert (again.floor, names(again)) == (None, [])


def test_another_digest_than_was_published_is_an_alarm_without_a_probe():
    report = inspector()(replace(RECEIPT, digest="other"), (), newest=1)
    assert (report.tokens, names(report)) == (0, ["digest"])
    assert names(inspector()(RECEIPT, (), newest=1)) == []


def test_a_gap_that_grows_at_learning_rate_0_is_an_alarm():
    judge, learning = inspector(learns=False), inspector()
    reports = [judge(RECEIPT, probe(-1.001 - i * 1e-4), newest=1) for i in range(5)]
    assert [names(report) for report in reports] == [[], [], [], [], ["probe_growth"]]
    for i in range(5):
        assert names(learning(RECEIPT, probe(-1.001 - i * 1e-4), newest=1)) == []


def test_a_claimed_grid_is_tested_once():
    """The imitated grid moves nothing, so there is nothing to regress on and no verdict."""
    judge = inspector()
    judge(RECEIPT, probe(-1.1, -1.2, precision="float32+int8"), newest=1)
    assert judge.take_metrics()["grid/se"].mean == 0
    judge(RECEIPT, probe(-1.1, -1.2, precision="float32+int8"), newest=1)
    assert "grid/se" not in judge.take_metrics()


def test_metrics_are_those_of_all_loads_since_the_step_before():
    judge = inspector()
    judge(RECEIPT, probe(-1.001, -1.003), newest=1)
    judge(replace(RECEIPT, engine="f"), probe(-1.004), newest=1)
    found = judge.take_metrics()
    assert found["probe/abs_gap"].count == 6
    assert found["probe/abs_gap"].sum == pytest.approx(0.016, rel=1e-3)
    assert found["probe/excess"].max == pytest.approx(0.4, rel=1e-3)
    assert judge.take_metrics() == {}
