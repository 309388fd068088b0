"""The rules of admission, consumption and sync, as the records of whole runs show them."""

from __future__ import annotations

import pytest

from support.live_runs import Runs, digests, events, lags_of, rows, trained, versions_of
from trueup.records.audit import audit
from trueup.records.directory import RunDirectory

pytestmark = pytest.mark.timeout(300)
"""Room to build the base policy on a busy machine."""

_SLOW_TOOLS = ("environment.latency.median_s=0.02", "environment.latency.sigma=1.0")


def _version_of_step(run: RunDirectory) -> dict[int, int]:
    """The trainer's version at the start of each step."""
    return {claim.payload["step"]: claim.version for claim in events(run, "claim")}


def _synced(run: RunDirectory) -> list[tuple[int, int]]:
    """(newest version published, version applied) of each sync but those that end the run, which
    bring every engine to the last version."""
    newest, found = 0, []
    for event in events(run, "publish", "apply", "checkpoint"):
        if event.kind == "publish":
            newest = event.version
        elif event.kind == "apply":
            found.append((newest, event.version))
        elif event.kind == "checkpoint":
            break
    return found


# ---- synchronous, two versions late


@pytest.fixture(scope="module")
def delayed(runs: Runs) -> RunDirectory:
    return runs.finished(
        "delayed",
        "train.steps=5",
        "schedule.staleness=0",
        "sync.delay=2",
        "sync.transport=filesystem",
    )


def test_a_delayed_engine_serves_the_version_two_before(delayed: RunDirectory) -> None:
    synced = _synced(delayed)
    assert all(version == max(0, newest - 2) for newest, version in synced)
    assert [version for _, version in synced] == list(range(len(synced)))
    assert len(synced) > 1
    assert audit(delayed) == []


def test_without_staleness_the_lag_is_the_delay(delayed: RunDirectory) -> None:
    version = _version_of_step(delayed)
    for row in trained(delayed):
        assert set(lags_of(row)) == {min(2, version[row["step"]])}
        assert set(versions_of(row)) == {max(0, version[row["step"]] - 2)}
        assert set(row["lag_in_queue"]) == {0}


# ---- two engines that drain


@pytest.fixture(scope="module")
def drained(runs: Runs) -> RunDirectory:
    return runs.finished(
        "drained",
        "train.steps=4",
        "schedule.staleness=1",
        "schedule.sync_mode=drain",
        "engine.count=2",
        "engine.slots=8",
        *_SLOW_TOOLS,
    )


def test_no_episode_of_a_drained_engine_spans_two_versions(drained: RunDirectory) -> None:
    assert {len(set(versions_of(row))) for row in trained(drained)} == {1}
    assert max(lag for row in trained(drained) for lag in lags_of(row)) <= 1
    assert audit(drained) == []


def test_two_engines_serve_the_same_versions_and_both_sample(drained: RunDirectory) -> None:
    sampled = [{span["engine"] for span in row["spans"]} for row in trained(drained)]
    assert all(len(engines) == 1 for engines in sampled)
    assert set.union(*sampled) == {"engine-0", "engine-1"}
    published = digests(drained)
    applied = events(drained, "apply")
    assert all(event.payload["digest"] == published[event.version] for event in applied)
    of_each = [
        [e.version for e in applied if e.engine == name] for name in ("engine-0", "engine-1")
    ]
    assert of_each[0] == of_each[1]


# ---- a sync for every other version, everything accepted, every patch graded


@pytest.fixture(scope="module")
def every_other(runs: Runs) -> RunDirectory:
    return runs.finished(
        "every-other",
        "train.steps=5",
        "schedule.staleness=2",
        "schedule.sync_every=2",
        "schedule.consume=accept",
        "environment.verdict_cache=false",
        *_SLOW_TOOLS,
    )


def test_engines_load_every_other_version(every_other: RunDirectory) -> None:
    synced = _synced(every_other)
    assert len(synced) > 1
    assert all(newest == version and version % 2 == 0 for newest, version in synced)
    assert audit(every_other) == []


def test_what_is_accepted_is_trained_in_the_order_in_which_it_was_finished(
    every_other: RunDirectory,
) -> None:
    closed = [event.group for event in events(every_other, "close")]
    claimed = [event.group for event in events(every_other, "claim")]
    assert claimed == closed[: len(claimed)]


def test_without_a_cache_every_patch_runs_in_the_sandbox(every_other: RunDirectory) -> None:
    patches = hits = ran = 0
    for event in events(every_other, "finish"):
        counters = event.payload["counters"]
        patches += counters.get("patches", 0)
        hits += counters.get("verdict_cache_hits", 0)
        ran += counters.get("sandbox_runs", 0)
    assert (hits, ran) == (0, patches)
    assert patches >= len(trained(every_other)) / 2
    statuses = {turn["tool_status"] for row in rows(every_other) for turn in row["turns"]}
    assert "cached" not in statuses


# ---- every rule of consumption on the real system


@pytest.mark.slow
@pytest.mark.parametrize("consume", ["wait", "accept", "drop", "requeue", "mask"])
def test_the_records_of_every_rule_of_consumption_hold(runs: Runs, consume: str) -> None:
    run = runs.finished(
        f"consume-{consume}",
        "train.steps=6",
        "schedule.staleness=1",
        f"schedule.consume={consume}",
        "environment.latency.median_s=0.1",
        "environment.latency.sigma=1.5",
    )
    assert audit(run) == []
    lags = [lag for row in trained(run) for lag in lags_of(row)]
    kept = [
        lag
        for row in trained(run)
        for lag, keep in zip(lags_of(row), row["keep"], strict=True)
        if keep
    ]
    assert max(kept if consume == "mask" else lags) <= 1 or consume == "accept"


@pytest.mark.slow
def test_groups_that_miss_their_deadline_close_with_who_is_there(runs: Runs) -> None:
    run = runs.finished(
        "deadlines",
        "train.steps=4",
        "schedule.timeout_s=0.5",
        "environment.latency.median_s=0.2",
        "environment.latency.sigma=1.5",
    )
    assert audit(run) == []
    reasons = [event.payload["reason"] for event in events(run, "close")]
    assert "timeout" in reasons
    assert any(row["status"] == "aborted" for row in rows(run))
