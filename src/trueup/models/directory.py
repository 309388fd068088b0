"""Directories that exist whole or not at all.

A directory is written beside its final place, sealed by a manifest of digests as its last file, and
renamed: a reader sees all of it or nothing, and finds any byte that changed since.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trueup.errors import CheckpointError
from trueup.records.files import sync

MANIFEST = "MANIFEST.json"
_LONGEST_HEADER = 100_000_000
"""Bytes; what the safetensors format allows."""


@contextmanager
def publish(target: Path) -> Iterator[Path]:
    """A fresh directory to fill, which becomes `target` when the block ends without an error.

    What was at `target` before is replaced; until then it stays as it was.

    Raises:
        CheckpointError: The directory cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise CheckpointError(
            field=str(target), rule="a writable place", value=str(error)
        ) from None
    try:
        yield work
        work.chmod(0o755)
        _seal(work)
        _replace(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def verify(directory: Path) -> bool:
    """Compare every file with the manifest.

    Returns:
        False if the directory has no manifest (it was not written by `publish`), True if it holds.

    Raises:
        CheckpointError: No such directory; a file is missing, altered or unreadable, or the
            manifest is malformed.
    """
    if not directory.is_dir():
        raise CheckpointError(
            field="model directory", rule="an existing directory", value=str(directory)
        )
    if not (directory / MANIFEST).exists():
        return False
    for name, digest in _read_manifest(directory).items():
        try:
            found = _digest(directory / name)
        except OSError as error:
            raise CheckpointError(
                field=str(directory / name), rule="a readable file", value=str(error)
            ) from None
        if found != digest:
            raise CheckpointError(
                field=str(directory / name), rule=f"of SHA-256 {digest}", value=found
            )
    return True


def check_weights(directory: Path) -> None:
    """Refuse a directory whose weight files are missing or cut short, without reading the weights.

    Raises:
        CheckpointError: There is none, or one's header does not describe the file.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            field=str(directory), rule="with weights in safetensors", value="none"
        )
    for path in files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            try:
                header = json.loads(file.read(min(length, _LONGEST_HEADER)))
                header.pop("__metadata__", None)
                ends = [entry["data_offsets"][1] for entry in header.values()]
            except (ValueError, KeyError, TypeError, AttributeError):
                ends = []
        if not ends or 8 + length + max(ends) != path.stat().st_size:
            raise CheckpointError(field=str(path), rule="a whole safetensors file", value="damaged")


def read_text(path: Path) -> str:
    """A text file of a model directory.

    Raises:
        CheckpointError: It is missing or no UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            field=str(path), rule="a readable text file", value=str(error)
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model directory.

    Raises:
        CheckpointError: It is missing or something else.
    """
    try:
        found = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise CheckpointError(field=str(path), rule="JSON", value=str(error)) from None
    if not isinstance(found, dict):
        raise CheckpointError(field=str(path), rule="a JSON object", value=found)
    return found


def _read_manifest(directory: Path) -> dict[str, str]:
    path = directory / MANIFEST
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {str(name): str(digest) for name, digest in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(field=str(path), rule="a manifest", value=repr(error)) from None


def _seal(directory: Path) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    record = {"files": {str(path.relative_to(directory)): _digest(path) for path in files}}
    for path in files:
        sync(path)
    (directory / MANIFEST).write_text(json.dumps(record, indent=2) + "\n")
    sync(directory / MANIFEST)
    sync(directory)


def _replace(work: Path, target: Path) -> None:
    """Rename onto `target`; a directory in the way is moved aside first."""
    while True:
        try:
            os.rename(work, target)
        except OSError:
            if not target.exists():
                raise
            aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            with suppress(FileNotFoundError):  # another writer may have moved it first
                os.rename(target, aside)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            sync(target.parent)
            return


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
