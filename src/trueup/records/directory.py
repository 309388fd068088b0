"""Where the files of a run lie."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trueup.errors import RunDirectoryError

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


def checked_name(name: str, *, field: str = "run") -> str:
    """The name itself, if it can name a file or directory of a run.

    Raises:
        RunDirectoryError: Not `[A-Za-z0-9._-]{1,100}`, or a leading dot.
    """
    if not _NAME.fullmatch(name):
        rule = "1 to 100 of A-Z a-z 0-9 . _ - without a leading dot"
        raise RunDirectoryError(field=field, rule=rule, value=name)
    return name


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run: `runs/NAME/...`; use `create` or `open`."""

    path: Path

    @classmethod
    def create(cls, root: Path, name: str) -> RunDirectory:
        """Make the directory of a new run with its folders.

        Args:
            root: Folder of all runs; made if missing.
            name: Name of the run.

        Raises:
            RunDirectoryError: The name is not allowed, leads out of `root` or is taken, or the
                directory cannot be made.
        """
        run = cls.planned(root, name)
        try:
            for folder in (run.path, run.episodes, run.checkpoints, run.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            rule = "a directory that can be made"
            raise RunDirectoryError(field="run", rule=rule, value=str(error)) from None
        return run

    @classmethod
    def planned(cls, root: Path, name: str) -> RunDirectory:
        """The directory that `create` would make, which is not made; see there for the errors."""
        checked_name(name)
        path = root.resolve() / name
        if path.resolve() != path:
            rule = f"a directory inside {root}"
            raise RunDirectoryError(field="run", rule=rule, value=str(path.resolve()))
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            rule = "a new or empty directory (resume continues an existing run)"
            raise RunDirectoryError(field="run", rule=rule, value=str(path))
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """The directory of an existing run.

        Raises:
            RunDirectoryError: It does not exist or holds no ledger.
        """
        run = cls(path.resolve())
        if not run.ledger.is_file():
            rule = "the directory of a run (it holds run.db)"
            raise RunDirectoryError(field="run", rule=rule, value=str(path))
        return run

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    @property
    def manifest(self) -> Path:
        """Code, versions, hardware, seeds."""
        return self.path / "manifest.json"

    @property
    def ledger(self) -> Path:
        """The ledger's database."""
        return self.path / "run.db"

    @property
    def lock(self) -> Path:
        """Lock file of the controller."""
        return self.path / "controller.lock"

    @property
    def episodes(self) -> Path:
        """Folder of the episode table."""
        return self.path / "episodes"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Folder of the processes' logs."""
        return self.path / "logs"

    def episode_file(self, step: int) -> Path:
        """Episode table of one step."""
        return self.episodes / f"step-{step:06d}.parquet"

    def checkpoint(self, step: int) -> Path:
        """Checkpoint after one step."""
        return self.checkpoints / f"step-{step:06d}"

    def log(self, actor: str) -> Path:
        """Log of one actor.

        Raises:
            RunDirectoryError: The actor's name is not allowed as a file name.
        """
        return self.logs / f"{checked_name(actor, field='actor')}.log"
