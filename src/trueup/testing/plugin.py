"""pytest plugin: run what is known to go wrong against anyone's correction or inference engine.

    pytest --trueup-correction package.module:function
    pytest --trueup-engine http://127.0.0.1:8000 --trueup-model DIR

collects the cases C1-C27, or the checks of an engine, and nothing else. What the function cannot
express, or the engine does not allow to be checked, is reported as "not expressible", which is
neither passed nor failed; `--trueup-strict` makes it a failure. The signature of a correction is in
`trueup.testing.protocol`; an engine is the address of a server, or package.module:function of a
factory like those of `trueup.engines.table`.

Loaded by every pytest run in the environment, so nothing heavy is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from trueup.errors import TrueupError

if TYPE_CHECKING:
    from trueup.testing.cases import Case
    from trueup.testing.engine.bench import Bench
    from trueup.testing.engine.finding import Check
    from trueup.testing.protocol import CorrectionFunction

OPTION = "--trueup-correction"
ENGINE = "--trueup-engine"
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
        ENGINE,
        metavar="URL",
        help="run trueup's checks against this inference engine instead of collecting tests: a "
        "server's address, or MODULE:FUNCTION of a factory",
    )
    group.addoption(
        "--trueup-engine-kind",
        metavar="KIND",
        default="openai",
        help="what speaks with the server (default: openai)",
    )
    group.addoption(
        "--trueup-model",
        metavar="DIR",
        help="Hugging Face directory of the model that the engine serves: to score what it says",
    )
    group.addoption(
        "--trueup-vocab-size",
        metavar="N",
        type=int,
        help="size of the vocabulary, where no model directory is given",
    )
    group.addoption(
        "--trueup-precision",
        metavar="NAME",
        default="bfloat16",
        help="arithmetic of the engine: float32, bfloat16, bfloat16+int8 ... (default: bfloat16)",
    )
    group.addoption(
        "--trueup-strict",
        action="store_true",
        help="what cannot be expressed or checked is a failure",
    )


def pytest_collection(session: pytest.Session) -> bool | None:
    """Collect cases or checks if an option asks for them; otherwise leave it to pytest."""
    config = session.config
    correction, engine = config.getoption(OPTION), config.getoption(ENGINE)
    if not correction and not engine:
        return None
    session.items = [
        *(_cases(session, correction) if correction else ()),
        *(_checks(session, engine) if engine else ()),
    ]
    hook = config.hook
    hook.pytest_collection_modifyitems(session=session, config=config, items=session.items)
    hook.pytest_collection_finish(session=session)
    session.testscollected = len(session.items)
    return True


def _cases(session: pytest.Session, named: str) -> list[pytest.Item]:
    from trueup.testing.cases import CASES

    correction = load(named)
    return [
        CaseItem.from_parent(session, name=case.number, case=case, correction=correction)
        for case in CASES
    ]


def _checks(session: pytest.Session, engine: str) -> list[pytest.Item]:
    from trueup.testing.engine.bench import Bench
    from trueup.testing.engine.opening import Options
    from trueup.testing.engine.table import CHECKS

    option = session.config.getoption
    model: str | None = option("--trueup-model")
    bench = Bench(
        Options(
            engine=engine,
            kind=option("--trueup-engine-kind"),
            precision=option("--trueup-precision"),
            model=None if model is None else Path(model),
            vocab_size=option("--trueup-vocab-size"),
        )
    )
    session.config.add_cleanup(bench.close)
    if not session.config.option.collectonly:
        try:
            bench.open()
        except (TrueupError, OSError) as error:
            raise pytest.UsageError(f"{ENGINE} {engine}: {error}") from error
    return [CheckItem.from_parent(session, name=c.name, check=c, bench=bench) for c in CHECKS]


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


class _Item(pytest.Item):
    """A test that may turn out not to be expressible."""

    def not_expressible(self, said: str, reason: str) -> None:
        """Report that nothing was judged.

        Raises:
            Failed: `--trueup-strict` is given.
            Skipped: It is not.
        """
        if self.config.getoption("--trueup-strict"):
            pytest.fail(said, pytrace=False)
        self.user_properties.append((NOT_EXPRESSIBLE, reason))
        pytest.skip(said)


class CaseItem(_Item):
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
        if found.status == "fail":
            pytest.fail(said, pytrace=False)
        if found.status == NOT_EXPRESSIBLE:
            self.not_expressible(said, found.reason)

    def reportinfo(self) -> tuple[str, None, str]:
        """Where the case is from, for the report."""
        return "trueup.testing.cases", None, f"{self.case.number}: {self.case.title}"


class CheckItem(_Item):
    """One check of an engine as a test."""

    def __init__(self, *, check: Check, bench: Bench, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.check = check
        self.bench = bench

    def runtest(self) -> None:
        """Make the check.

        Raises:
            Failed: What it expects does not hold, or the engine did not answer.
            Skipped: It cannot be made.
        """
        from trueup.testing.protocol import NotExpressible

        try:
            found = self.bench.run(self.check)
        except NotExpressible as reason:
            self.not_expressible(f"{self.check.name}: {reason}", str(reason))
        except TrueupError as error:
            pytest.fail(self.check.said(f"an error: {error}"), pytrace=False)
        else:
            if not found.ok:
                pytest.fail(self.check.said(found.measured), pytrace=False)

    def reportinfo(self) -> tuple[str, None, str]:
        """Where the check is from, for the report."""
        return "trueup.testing.engine", None, self.check.name


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
    """Say of each case or check that was not expressible why."""
    reports = terminalreporter.stats.get(NOT_EXPRESSIBLE, [])
    if reports:
        write: Callable[[str], None] = terminalreporter.write_line
        terminalreporter.section("not expressible")
        for report in reports:
            write(f"{report.nodeid}: {dict(report.user_properties)[NOT_EXPRESSIBLE]}")
