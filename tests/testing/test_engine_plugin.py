from pathlib import Path

import pytest

from support.lying import Rig, peaked
from support.serving import serving
from trueup.models.load import save_model
from trueup.testing.engine import bench, table

# Runs within a run forget what they import, and import it again beside what is remembered.
PRELOADED = (bench, table)
pytest_plugins = ["pytester"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    save_model(peaked(), directory)
    return directory


def run(pytester, engine, *options):
    pytester.makepyfile(test_other="def test_other(): assert False")
    return pytester.runpytest("-p", "no:cacheprovider", "--trueup-engine", engine, *options)


def served(fault: str = ""):
    """A server that holds the weights of the model directory."""
    rig = Rig(fault, model=peaked())
    return serving(rig.engine, rig.publisher.publish(rig.model), vocabulary=40)


def test_a_server_that_is_right_fails_no_check(pytester, model):
    with served() as url:
        result = run(pytester, url, "--trueup-model", model, "--trueup-precision", "float32")
    assert result.ret == pytest.ExitCode.OK, result.stdout.str()
    result.stdout.fnmatch_lines(["*push_arrives_whole: the engine takes no weights*"])
    result.stdout.fnmatch_lines(["*12 passed*5 not expressible*"])


@pytest.mark.parametrize(
    ("fault", "check", "measured"),
    [
        ("appended_eos", "truncation_is_reported", "stop at their third token"),
        ("dropped_logprobs", "ids_and_logprobs", "log-probs of exactly 0"),
        ("layer_skipped", "at_the_floor", "mean |d|"),
        ("raw_logprobs", "processed_temperature", "raw log-probs at temperature 0.6"),
        ("shifted_logprobs", "logprob_of_its_token", "nats (median of"),
        # Its adapter cannot even find out what the log-probs are of.
        ("top_p_unreported", "honours_top_p", "log-prob mode of the engine server"),
        ("wrong_temperature", "as_surprising_as_the_trainer", "too sharp"),
    ],
)
def test_a_server_that_lies_fails_the_check_of_its_lie(pytester, model, fault, check, measured):
    with served(fault) as url:
        result = run(
            pytester, url, "--trueup-model", model, "--trueup-precision", "float32", "-k", check
        )
    assert result.ret == pytest.ExitCode.TESTS_FAILED, result.stdout.str()
    result.assert_outcomes(failed=1, deselected=16)
    said = " ".join(result.stdout.lines)
    assert f"{check}: expected" in said
    assert measured in said
    assert "Usually:" in said


def test_without_a_model_what_needs_one_is_not_checked(pytester):
    with served() as url:
        result = run(pytester, url, "--trueup-vocab-size", "40", "--trueup-precision", "float32")
    assert result.ret == pytest.ExitCode.OK, result.stdout.str()
    result.stdout.fnmatch_lines(["*at_the_floor: no --trueup-model*", "*9 passed*8 not express*"])


def test_strict_makes_what_cannot_be_checked_a_failure(pytester):
    with served() as url:
        options = ("--trueup-vocab-size", "40", "--trueup-strict", "-k", "calibrated")
        result = run(pytester, url, *options)
    result.assert_outcomes(failed=1, deselected=16)


def test_a_factory_can_be_named_instead_of_an_address(pytester, model):
    pytester.makepyfile(
        mine="from trueup.engines.table import factory\nbuild = factory('embedded')"
    )
    pytester.syspathinsert()
    result = run(pytester, "mine:build", "--trueup-model", model, "-k", "attested or provenance")
    result.assert_outcomes(passed=2, deselected=15)


@pytest.mark.parametrize(
    ("engine", "options", "said"),
    [
        ("nowhere:build", ("--trueup-vocab-size", "40"), "MODULE:FUNCTION"),
        ("http://127.0.0.1:1", (), "--trueup-vocab-size"),
        ("http://127.0.0.1:1", ("--trueup-model", "/nowhere"), "/nowhere"),
        ("http://127.0.0.1:1", ("--trueup-vocab-size", "40", "--trueup-precision", "x"), "dtype"),
        ("http://example.org", ("--trueup-vocab-size", "40"), "https"),
    ],
)
def test_what_cannot_be_opened_is_a_usage_error(pytester, engine, options, said):
    result = run(pytester, engine, *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--trueup-engine {engine}*{said}*"])


def test_a_server_that_is_not_there_fails_the_check(pytester):
    options = ("--trueup-vocab-size", "40", "-k", "ids_and_logprobs")
    result = run(pytester, "http://127.0.0.1:1", *options)
    result.assert_outcomes(failed=1, deselected=16)
    result.stdout.fnmatch_lines(["*an error*"])
