import pytest

pytest_plugins = ["pytester"]

EXPRESSES_NOTHING = """
from trueup.testing.protocol import NotExpressible

def correction(arrays, method, run):
    raise NotExpressible("no method at all")
"""
ONES = """
from trueup.testing.protocol import NotExpressible, Outcome

def correction(arrays, method, run):
    if method.level != "token":
        raise NotExpressible("tokens only")
    return Outcome(weight=arrays.action.float(), keep=arrays.action)
"""


def run(pytester, source, *options):
    pytester.makepyfile(mine=source)
    pytester.syspathinsert()
    pytester.makepyfile(test_other="def test_other(): assert False")
    return pytester.runpytest("-p", "no:cacheprovider", "--trueup-correction", *options)


def test_what_cannot_be_expressed_is_neither_passed_nor_failed(pytester):
    result = run(pytester, EXPRESSES_NOTHING, "mine:correction")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["*C9*no method at all*", "*27 not expressible*"])
    assert "passed" not in result.stdout.lines[-1]
    assert "skipped" not in result.stdout.lines[-1]


def test_strict_makes_it_a_failure(pytester):
    result = run(pytester, EXPRESSES_NOTHING, "mine:correction", "--trueup-strict")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=27)


def test_a_wrong_outcome_fails_with_what_was_wrong(pytester):
    result = run(pytester, ONES, "mine:correction", "-k", "C19 or C9", "-v")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*C9 NOT EXPRESSIBLE*", "*C19 FAILED*"])
    result.stdout.fnmatch_lines(["*C19 truncation raises no small weight: weight is 1, not 0.05*"])
    result.stdout.fnmatch_lines(["*1 failed*25 deselected*1 not expressible*"])


@pytest.mark.parametrize(
    "named", ["nowhere:correction", "mine:nothing", "mine", "mine:NotExpressible.x", "os:sep"]
)
def test_a_name_that_is_no_correction_is_a_usage_error(pytester, named):
    result = run(pytester, EXPRESSES_NOTHING, named)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--trueup-correction*{named}*"])


def test_without_the_option_nothing_changes(pytester):
    pytester.makepyfile("def test_one(): pass")
    pytester.runpytest("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_loading_the_plugin_loads_nothing_heavy(pytester):
    pytester.makepyfile(
        """
        import sys

        def test_light():
            assert "trueup.testing.plugin" in sys.modules
            assert not {"torch", "numpy", "trueup.testing.cases"} & set(sys.modules)
        """
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
