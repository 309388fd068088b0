"""The rows of a file or folder: JSON Lines, Parquet, or NumPy archives.

A NumPy archive is columns: log-probs [E, T], or packed [N] with `lengths` [E]; what has one value
per episode is [E]. Nothing is unpickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trueup.errors import DataError, UsageError

Rows = Iterator[dict[str, Any]]


def files_of(path: Path) -> list[Path]:
    """The dump's files in natural order: the path itself, or all of one kind below it.

    Raises:
        UsageError: It does not exist, holds no such file, or files of several kinds.
    """
    if path.is_file():
        found = [path]
    else:
        found = [file for suffix in READERS for file in path.rglob(f"*{suffix}")]
    kinds = {file.suffix for file in found}
    if len(kinds) != 1 or not kinds <= READERS.keys():
        rule = f"a run, or a file or folder of one of {', '.join(READERS)}"
        value = f"{path} ({', '.join(sorted(kinds)) or 'nothing of these'})"
        raise UsageError(field="path", rule=rule, value=value)
    return sorted(found, key=_natural)


def rows_of(file: Path) -> Rows:
    """The rows of one file.

    Raises:
        DataError: It cannot be read as what its name says.
    """
    return READERS[file.suffix](file)


def _natural(file: Path) -> list[tuple[str, int]]:
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", str(file))]


def _json_lines(file: Path) -> Rows:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # of the syntax or of the encoding
                raise _unreadable(file, f"line {number}: {error}") from None
            if not isinstance(row, dict):
                raise _unreadable(file, f"line {number} is no object")
            yield row


def _parquet(file: Path) -> Rows:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(file, str(error)) from None


def _archive(file: Path) -> Rows:
    import zipfile

    import numpy as np

    try:
        with np.load(file, allow_pickle=False) as archive:
            columns = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise _unreadable(file, str(error)) from None
    yield from _split(file, columns)


def _split(file: Path, columns: dict[str, Any]) -> Rows:
    import numpy as np

    lengths = columns.pop("lengths", None)
    padded = [len(column) for column in columns.values() if column.ndim > 1]
    if lengths is None and not padded:
        raise DataError(field=f"{file.name}, lengths", rule="given with packed columns", value=None)
    episodes = max(padded) if lengths is None else len(lengths)
    edges = np.zeros(1, int) if lengths is None else np.cumsum([0, *lengths])
    tokens = int(edges[-1])
    for name, column in columns.items():
        if column.ndim and len(column) not in (episodes, tokens or episodes):
            both = f"of length {episodes} (episodes)" + (f" or {tokens} (tokens)" if tokens else "")
            raise DataError(field=f"{file.name}, {name}", rule=both, value=len(column))
    for index in range(episodes):
        row = {}
        for name, column in columns.items():
            if not column.ndim:
                row[name] = column.item()
            elif lengths is not None and len(column) == tokens:
                row[name] = column[edges[index] : edges[index + 1]]
            else:
                row[name] = column[index] if column.ndim > 1 else column[index].item()
        yield row


def _unreadable(file: Path, why: str) -> DataError:
    return DataError(f"{file} cannot be read: {why}", field=str(file), rule="a readable dump")


READERS: Mapping[str, Callable[[Path], Rows]] = {
    ".jsonl": _json_lines,
    ".parquet": _parquet,
    ".npz": _archive,
}
"""By the end of a file's name."""
