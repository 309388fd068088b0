"""The table of experiments, by the name that `trueup reproduce` takes.

To add one: a module with a `Run`, and an entry here; its folder in `experiments/` of the repository
holds the question, the committed result and the verdict.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trueup.errors import ConfigError

if TYPE_CHECKING:
    from trueup.experiments.base import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One experiment; nothing is imported before it runs."""

    name: str
    question: str
    run: str
    """`module:function`."""
    aliases: tuple[str, ...] = ()

    def load(self) -> Run:
        """Import it."""
        module, _, function = self.run.partition(":")
        found: Run = getattr(importlib.import_module(module), function)
        return found


EXPERIMENTS = (
    Experiment(
        name="estimator-table",
        question="How much bias and variance does each correction leave where the gradient is "
        "known?",
        run="trueup.experiments.estimators.run:run",
        aliases=("13.4",),
    ),
)
"""Every experiment."""


def find(name: str) -> Experiment:
    """The experiment of that name or alias.

    Raises:
        ConfigError: There is none; names the nearest.
    """
    for experiment in EXPERIMENTS:
        if name in (experiment.name, *experiment.aliases):
            return experiment
    known = [n for e in EXPERIMENTS for n in (e.name, *e.aliases)]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"unknown experiment {name!r}{hint} (experiments: {', '.join(known)})",
        field="experiment",
        rule=f"one of {', '.join(known)}",
        value=name,
    )
