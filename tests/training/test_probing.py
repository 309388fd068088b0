"""What follows a load, in a controller on logical time with scripted engines."""

from pathlib import Path
from typing import Any

import pytest

from support.pipeline import Pipeline
from trueup import config
from trueup.errors import EngineFault
from trueup.records.audit import audit
from trueup.training.probe import ProbeSet
from trueup.types import LoadReceipt

SET = ProbeSet.of(config.load("", ["probe.sequences=2"]), vocabulary=50, positions=64)
TOO_FAR = ("probe", "further off than when it was fresh")


def alarmed_at(version: int) -> Any:
    def alarms(receipt: LoadReceipt) -> tuple[tuple[str, str], ...]:
        return (TOO_FAR,) if receipt.version == version else ()

    return alarms


def play(root: Path, *overrides: str, **options: Any) -> Pipeline:
    alarm = options.pop("alarm", -1)
    pipeline = Pipeline(root, overrides, **{"probes": SET, **options})
    pipeline.learner.alarms = alarmed_at(alarm)
    assert pipeline.play() == "done"
    return pipeline


def probed(pipeline: Pipeline) -> list[tuple[str, int]]:
    return [(event.engine, event.version) for event in pipeline.events("probe")]


def test_every_load_of_every_engine_is_probed_and_judged(tmp_path: Path):
    pipeline = play(tmp_path, "engine.count=2")
    applied = [(event.engine, event.version) for event in pipeline.events("apply")]
    assert len(applied) > 6
    assert sorted(probed(pipeline)) == sorted(applied)
    assert {len(episodes) for _, _, episodes in pipeline.learner.loads} == {2}
    assert len({name for _, _, names in pipeline.learner.loads for name in names}) == 2 * len(
        applied
    )
    assert audit(pipeline.run) == []


def test_loads_between_probes_are_judged_by_their_receipt_alone(tmp_path: Path):
    pipeline = play(tmp_path, "probe.every=3")
    versions = [version for _, version, _ in pipeline.learner.loads]
    decoded = [version for _, version, episodes in pipeline.learner.loads if episodes]
    assert len(versions) > 6
    assert sorted(decoded) == sorted(versions)[::3]
    assert probed(pipeline) == [("engine-0", version) for version in sorted(decoded)]


def test_a_run_can_do_without_probes(tmp_path: Path):
    assert probed(play(tmp_path, "probe.every=0")) == []


def test_an_alarm_is_recorded_and_the_run_goes_on(tmp_path: Path):
    pipeline = play(tmp_path, alarm=2)
    alarms = {e.version: e.payload["alarms"] for e in pipeline.events("probe")}
    assert alarms.pop(2) == [list(TOO_FAR)]
    assert not any(alarms.values())


def test_an_alarm_stops_the_run_where_it_is_asked_to(tmp_path: Path):
    with pytest.raises(EngineFault, match="engine-0, version 2: alarm probe: further off"):
        play(tmp_path, "probe.on_alarm=stop", alarm=2)


def test_an_engine_that_cannot_decode_the_probe_is_an_alarm(tmp_path: Path):
    fault = EngineFault(field="logits", rule="finite", value="non-finite")
    pipeline = play(tmp_path, broken=fault)
    for event in pipeline.events("probe"):
        ((name, meaning),) = event.payload["alarms"]
        assert name == "probe_decoded"
        assert "logits must be finite" in meaning


def test_the_ledger_says_what_a_load_cost(tmp_path: Path):
    for event in play(tmp_path).events("apply"):
        assert {"digest", "nbytes", "t_start", "t_staged", "prepare_s", "pause_s"} <= set(
            event.payload
        )


def test_a_probe_of_a_version_that_was_not_applied_is_a_violation(tmp_path: Path):
    from trueup.records.ledger import Ledger

    pipeline = play(tmp_path)
    ledger = Ledger.open(pipeline.run.ledger)
    row = pipeline.events("probe")[-1]
    ledger.append("probe", actor="e", engine="engine-0", version=99, payload=row.payload)
    ledger.close()
    (violation,) = audit(pipeline.run)
    assert violation.invariant == "I4"
    assert "a probe is of a version that its engine had not applied" in violation.message
