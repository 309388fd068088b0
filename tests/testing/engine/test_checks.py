"""Every fault of the kit fails the check that is made for it, and an honest engine fails none."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.lying import peaked
from trueup.engines.lying import FAULTS, planting
from trueup.engines.table import Build, factory
from trueup.models.load import save_model
from trueup.testing.engine.bench import Bench
from trueup.testing.engine.opening import Options
from trueup.testing.engine.table import CHECKS
from trueup.testing.protocol import NotExpressible

CHECK = {check.name: check for check in CHECKS}
FOUND_BY = {
    "stale_head": "push_arrives_whole",
    "old_tensor": "push_arrives_whole",
    "missed_update": "push_arrives_whole",
    "layer_skipped": "at_the_floor",
    "label_off_by_one": "push_is_attested",
    "label_by_client": "push_splits_running_replies",
    "kept_kv_unreported": "push_splits_running_replies",
    "surviving_prefix_cache": "push_empties_the_prefix_cache",
    "noop_quantisation": "quantisation_acts",
    "wrong_temperature": "as_surprising_as_the_trainer",
    "raw_logprobs": "processed_temperature",
    "top_p_unreported": "honours_top_p",
    "appended_eos": "truncation_is_reported",
    "shifted_logprobs": "logprob_of_its_token",
    "dropped_logprobs": "ids_and_logprobs",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    save_model(peaked(), directory)
    return directory


@contextmanager
def opened(build: Build, model: Path, precision: str = "float32") -> Iterator[Bench]:
    """An engine that serves the model, ready for checks."""
    bench = Bench(Options(engine=build, kind="", precision=precision, model=model, vocab_size=None))
    try:
        bench.open()
        yield bench
    finally:
        bench.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_fails_the_check_that_is_made_for_it(fault: str, model: Path) -> None:
    precision = "float32+int8" if fault == "noop_quantisation" else "float32"
    with opened(planting(fault, seed=0), model, precision) as bench:
        found = bench.run(CHECK[FOUND_BY[fault]])
    assert not found.ok, found.measured


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float32+int8"])
def test_an_honest_engine_passes_every_check(precision: str, model: Path) -> None:
    """Chances of a false alarm are those that the checks state, 3e-5 together; keys are fixed."""
    inapplicable = set()
    with opened(factory("embedded"), model, precision) as bench:
        for check in CHECKS:
            try:
                found = bench.run(check)
            except NotExpressible:
                inapplicable.add(check.name)
            else:
                assert found.ok, check.said(found.measured)
    assert inapplicable == (set() if "+" in precision else {"quantisation_acts"})


def test_a_fault_fails_nothing_that_it_does_not_touch(model: Path) -> None:
    with opened(planting("label_off_by_one", seed=0), model) as bench:
        for name in ("ids_and_logprobs", "sampled_as_told", "at_the_floor", "push_arrives_whole"):
            assert bench.run(CHECK[name]).ok


def test_every_check_and_fault_is_documented_with_what_finds_it() -> None:
    page = (Path(__file__).parents[3] / "docs" / "checking-engines.md").read_text("utf-8")
    rows = {
        line.split("|")[1].strip(): line.replace("\\|", "|")
        for line in page.splitlines()
        if line.startswith("| `")
    }
    for check in CHECKS:
        row = rows[f"`{check.name}`"]
        assert f"| {check.expected} | {check.usually} | {check.false_alarm} |" in row
    for name, fault in FAULTS.items():
        row = rows[f"`{name}`"]
        assert f"| {fault.meaning} | {fault.seen} | {fault.planted} | `{FOUND_BY[name]}` |" in row
