"""An engine that stays up while checks are run against it, one after the other."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from trueup.testing.engine.finding import Check, Finding
from trueup.testing.engine.opening import Options, open_subject
from trueup.testing.engine.subject import Subject


class Bench:
    """Holds the engine and the event loop that it lives in.

    Args:
        options: What to open.
    """

    def __init__(self, options: Options) -> None:
        """Open nothing yet."""
        self._options = options
        self._runner = asyncio.Runner()
        self._directory = tempfile.TemporaryDirectory(prefix="trueup-engine-")
        self._subject: Subject | None = None

    def open(self) -> None:
        """Build the engine; see `open_subject` for the errors."""
        self._subject = self._runner.run(open_subject(self._options, Path(self._directory.name)))

    def run(self, check: Check) -> Finding:
        """Make a check.

        Raises:
            NotExpressible: It cannot be made here.
            Fault: The engine did not answer.
        """
        assert self._subject is not None
        return self._runner.run(check.run(self._subject))

    def close(self) -> None:
        """Close the engine and the loop; may be called before `open`."""
        if self._subject is not None:
            self._runner.run(self._subject.engine.close())
        self._runner.close()
        self._directory.cleanup()
