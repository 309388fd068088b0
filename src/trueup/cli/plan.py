"""What `trueup train` was asked to do, before anything is done."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from trueup import config as configuration
from trueup.cli.output import say
from trueup.cli.runs import newest, planned, shown
from trueup.cli.selection import Words, read, select
from trueup.config import TINY_AGENT, Config, cache_dir
from trueup.errors import UsageError
from trueup.records.directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run to start, or to go on with."""

    source: str
    """Recipe or file of the configuration; the run itself when it is resumed."""
    config: Config
    run: RunDirectory
    resumes: bool
    overrides: tuple[str, ...] = ()
    """Changes to the configuration of a resumed run."""

    @property
    def directory(self) -> str:
        """The run's directory, as it is typed."""
        return shlex.quote(str(shown(self.run.path)))

    @property
    def size(self) -> str:
        """Steps and episodes in words."""
        train = self.config.train
        return (
            f"{train.steps} steps of {train.groups_per_step} groups × {train.samples_per_group} "
            f"samples = {self.config.episodes_per_step} episodes"
        )

    @property
    def builds_base(self) -> bool:
        """Whether the policy to start from was never made here.

        Which base of TinyAgent fits is known to the environment alone: one that does not fit is
        replaced unsaid.
        """
        from trueup.models.catalog import MODELS

        path = self.config.model.path
        if self.resumes or (path != TINY_AGENT and path not in MODELS):
            return False
        return not any(cache_dir().glob(f"{path}-*"))


def new(words: Words, file: Path | None, path: Path | None) -> Plan:
    """Plan a new run.

    Raises:
        UsageError: The configuration is wrong, or the directory cannot be a new run's.
    """
    selected = select(words, file)
    run = planned(path, selected.stem)
    return Plan(source=selected.source, config=selected.config, run=run, resumes=False)


def resumed(words: Words, file: Path | None, path: Path | None) -> Plan:
    """Plan to go on with a run, the newest if none is named.

    Raises:
        UsageError: There is no such run, its configuration is wrong, or another one is named.
    """
    if words.recipes or file:
        raise UsageError(
            "a resumed run has its configuration; only changes key.path=value can be given",
            field="--resume",
            rule="without recipe and --config",
            value=str(file or words.recipes[0]),
        )
    run = newest() if path is None else RunDirectory.open(path)
    if path is None:
        say(f"the newest run is {shown(run.path)}")
    config = configuration.load(read(run.config), words.overrides, source=str(shown(run.config)))
    return Plan(source=run.name, config=config, run=run, resumes=True, overrides=words.overrides)
