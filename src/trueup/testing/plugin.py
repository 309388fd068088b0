"""pytest plugin: run the known failures C1-C27 against anyone's correction.

    pytest --trueup-correction package.module:function

collects the cases and nothing else. A case that the function cannot express is reported as
"not expressible", which is neither passed nor failed; `--trueup-strict` makes it a failure. The
signature is in `trueup.testing.protocol`.

Loaded by every pytest run in the environment, so nothing heavy is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from trueup.testing.cases import Case
    from trueup.testing.protocol import CorrectionFunction

OPTION = "--trueup-correction"
NOT_EXPRESSIBLE = "not expressible"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("trueup")
    group.addoption(
        OPTION,
        metavar="MODULE:FUNCTION",
        help="run trueup's cases C1-C27 against this correction instead of collecting tests",
    )
    group.addoption(
        "--trueup-strict",
        action="store_true",
        help="a case that the correction cannot express is a failure",
    )


def pytest_collection(session: pytest.Session) -> bool | None:
    """Collect the cases if a correction is named; otherwise leave collection to pytest."""
    config = session.config
    named = config.getoption(OPTION)
    if not named:
        return None
    correction = load(named)
    from trueup.testing.cases import CASES

    session.items = [
        CaseItem.from_parent(session, name=case.number, case=case, correction=correction)
        for case in CASES
    ]
    hook = config.hook
    hook.pytest_collection_modifyitems(session=session, config=config, items=session.items)
    hook.pytest_collection_finish(session=session)
    session.testscollected = len(session.items)
    return True


def load(named: str) -> CorrectionFunction:
    """The object that MODULE:FUNCTION names.

    Raises:
        UsageError: It cannot be imported, or is not callable.
    """
    module, _, name = named.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise pytest.UsageError(f"{OPTION} {named}: {error}") from error
    if not callable(found):
        raise pytest.UsageError(f"{OPTION} must be MODULE:FUNCTION of a callable, got {named!r}")
    return cast("CorrectionFunction", found)


class CaseItem(pytest.Item):
    """One case as a test."""

    def __init__(self, *, case: Case, correction: CorrectionFunction, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.case = case
        self.correction = correction

    def runtest(self) -> None:
        """Judge the case.

        Raises:
            Failed: The outcome is not the right one.
            Skipped: The correction cannot express the case.
        """
        from trueup.testing.judge import judge

        found = judge(self.case, self.correction)
        said = f"{self.case.number} {self.case.title}: {found.reason}"
        strict = self.config.getoption("--trueup-strict")
        if found.status == "fail" or (found.status == NOT_EXPRESSIBLE and strict):
            pytest.fail(said, pytrace=False)
        if found.status == NOT_EXPRESSIBLE:
            self.user_properties.append((NOT_EXPRESSIBLE, found.reason))
            pytest.skip(said)

    def reportinfo(self) -> tuple[str, None, str]:
        """Where the case is from, for the report."""
        return "trueup.testing.cases", None, f"{self.case.number}: {self.case.title}"


def pytest_report_teststatus(
    report: pytest.CollectReport | pytest.TestReport,
) -> tuple[str, str, str] | None:
    """Report what cannot be expressed as such; a module that is skipped whole is something else."""
    if not isinstance(report, pytest.TestReport) or not report.skipped:
        return None
    if any(key == NOT_EXPRESSIBLE for key, _ in report.user_properties):
        return NOT_EXPRESSIBLE, "n", NOT_EXPRESSIBLE.upper()
    return None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say of each case that was not expressible why."""
    reports = terminalreporter.stats.get(NOT_EXPRESSIBLE, [])
    if reports:
        write: Callable[[str], None] = terminalreporter.write_line
        terminalreporter.section("cases that the correction cannot express")
        for report in reports:
            write(f"{report.nodeid}: {dict(report.user_properties)[NOT_EXPRESSIBLE]}")
