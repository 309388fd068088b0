"""On a logical clock two asynchronous runs are the same run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.live_runs import (
    Runs,
    digests,
    events,
    lags_of,
    metrics,
    rows,
    trained,
    versions_of,
    without_times,
)
from trueup.records.audit import audit
from trueup.records.directory import RunDirectory

pytestmark = pytest.mark.timeout(300)
"""Room to build the base policy on a busy machine."""

_ASYNCHRONOUS = (
    "train.steps=4",
    "train.deterministic=true",
    "schedule.staleness=2",
    "schedule.sync_mode=interrupt",
    "checkpoint.every=1",
    "checkpoint.keep=9",
    "eval.samples=1",
    "environment.latency.median_s=0.3",
    "environment.latency.sigma=1.0",
)
"""The latency, which costs logical time only, keeps episodes running while weights change."""

_CLOCK = ("run", "t_submit", "t_start", "t_end", "turns")


@pytest.fixture(scope="module")
def run(runs: Runs) -> RunDirectory:
    return runs.finished("deterministic", *_ASYNCHRONOUS)


@pytest.fixture(scope="module")
def again(runs: Runs) -> RunDirectory:
    return runs.finished("deterministic-again", *_ASYNCHRONOUS)


def test_two_runs_publish_the_same_weights(run: RunDirectory, again: RunDirectory) -> None:
    assert sorted(digests(run)) == [0, 1, 2, 3, 4]
    assert len(set(digests(run).values())) == 5
    assert digests(run) == digests(again)


def test_two_runs_write_the_same_ledger(run: RunDirectory, again: RunDirectory) -> None:
    first, second = events(run), events(again)
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert without_times(one) == without_times(other)
    assert metrics(run) == metrics(again)


def test_two_runs_write_the_same_episode_table(run: RunDirectory, again: RunDirectory) -> None:
    def timeless(row: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if name not in _CLOCK}

    assert [timeless(row) for row in rows(run)] == [timeless(row) for row in rows(again)]


def test_the_run_was_asynchronous_and_its_records_hold(run: RunDirectory) -> None:
    lags = [lag for row in trained(run) for lag in lags_of(row)]
    assert max(lags) == 2
    assert any(len(set(versions_of(row))) > 1 for row in rows(run))
    assert audit(run) == []


# ---- what the table says of every token is true


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_behaviour_log_probs_are_those_of_the_version_that_sampled(
    runs: Runs, run: RunDirectory, version: int
) -> None:
    """The stock model at a checkpoint, whole sequences: 1e-4 is float32 in another order."""
    torch.set_num_threads(1)
    path = run.checkpoint(version) if version else runs.base
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    compared = 0
    for row in rows(run):
        ids = torch.tensor(row["token_ids"])
        at = torch.tensor(row["action"]).nonzero().flatten()
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0].double()
        logp = logits.log_softmax(-1)[at - 1, ids[at]]
        here = torch.tensor(versions_of(row)) == version
        compared += int(here.sum())
        found = torch.tensor(row["logp_behaviour"], dtype=torch.float64)
        assert torch.allclose(found[here], logp[here], atol=1e-4, rtol=0)
        if row["logp_version"] is not None:
            found = torch.tensor(row["logp_version"], dtype=torch.float64)
            assert torch.allclose(found[here], logp[here], atol=1e-4, rtol=0)
        if row["reason"] is None and row["step"] == version:
            found = torch.tensor(row["logp_target"], dtype=torch.float64)
            assert torch.allclose(found, logp, atol=1e-4, rtol=0)
    assert compared > 0


def test_target_and_version_are_one_where_nothing_is_stale(run: RunDirectory) -> None:
    stale = []
    for row in trained(run):
        both = zip(row["logp_target"], row["logp_version"], lags_of(row), strict=True)
        for target, version, lag in both:
            if lag == 0:
                assert target == version
            else:
                stale.append(abs(target - version))
    assert max(stale) > 1e-3


def test_lags_are_the_distance_from_the_version_that_sampled(run: RunDirectory) -> None:
    for row in trained(run):
        assert lags_of(row) == [row["step"] - version for version in versions_of(row)]
        assert min(row["lag_in_flight"]) >= 0
        assert min(row["lag_in_queue"]) >= 0


def test_recomputed_caches_say_how_far_updates_moved_the_policy(run: RunDirectory) -> None:
    moved = [metric for (_, name), metric in metrics(run).items() if name == "gap/abs_rescored"]
    assert sum(metric.count for metric in moved) > 0
    # An update at this learning rate moves a log-prob by tenths of a nat at most, and moves it.
    assert all(0 < metric.sum / metric.count < 1 for metric in moved)


def test_a_kept_cache_is_told_apart_from_staleness_and_engine(runs: Runs) -> None:
    run = runs.finished("kept-cache", *_ASYNCHRONOUS, "engine.kv_mode=keep")
    assert audit(run) == []
    spans = [span for row in trained(run) for span in row["spans"]]
    kept = [span for span in spans if span["kv"] == "kept"]
    assert kept
    assert all(max(span["context_versions"]) < span["version"] for span in kept)
    cache, engine = (
        max(metric.max for (_, found), metric in metrics(run).items() if found == name)
        for name in ("gap/abs_cache", "gap/abs_engine")
    )
    # In float32 the engine is the trainer to rounding, whoever wrote its cache.
    assert engine < 1e-4 < cache
