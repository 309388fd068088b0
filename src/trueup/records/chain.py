"""The hash chain over the ledger's rows."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from typing import Any

COLUMNS = (
    *("seq", "actor", "actor_seq", "t_mono", "t_wall", "kind"),
    *("episode", "attempt", "grp", "version", "engine", "payload", "chain"),
)

# Numbers, then the lengths of the texts: no two rows share their canonical bytes.
_NUMBERS = struct.Struct("<qqddqqq5I")


def link(before: bytes, row: tuple[Any, ...]) -> bytes:
    """Hash of a row and of the chain before it.

    Args:
        before: Chain of the row before; empty for the first.
        row: The columns up to `payload`, as stored.

    Raises:
        struct.error, TypeError, AttributeError, UnicodeEncodeError: A column holds a value that a
            ledger never stores.
    """
    seq, actor, actor_seq, t_mono, t_wall, kind, episode, attempt, group, version, engine, text = (
        row
    )
    texts = [actor.encode(), kind.encode(), episode.encode(), engine.encode(), text.encode()]
    numbers = _NUMBERS.pack(
        seq, actor_seq, t_mono, t_wall, attempt, group, version, *map(len, texts)
    )
    return hashlib.blake2b(b"".join((before, numbers, *texts)), digest_size=16).digest()


def verify(rows: Iterable[tuple[Any, ...]], head: tuple[int, str]) -> Iterator[tuple[int, str]]:
    """Where the chain is broken, as (seq, message), one for each break.

    After a break the chain is taken up again from what the row claims, so that one altered row is
    one break and not as many as there are rows after it.

    Args:
        rows: All rows in order of `seq`, columns as in `COLUMNS`.
        head: `seq` and `chain` of the last row, from the table `head`.
    """
    seq, digest = 0, ""
    actors: dict[Any, Any] = {}
    for row in rows:
        if row[0] != seq + 1:
            yield row[0], f"row {seq + 1} is missing: row {seq} is followed by row {row[0]}"
        last = actors.get(row[1], 0)
        if isinstance(last, int) and row[2] != last + 1:
            yield row[0], f"row {row[0]} is number {row[2]} of {row[1]}, after number {last}"
        if row[-1] != _expected(digest, row):
            yield (
                row[0],
                f"row {row[0]} does not hash to its chain: it or its predecessor was altered",
            )
        seq, digest, actors[row[1]] = row[0], row[-1], row[2]
    if (seq, digest) != tuple(head):
        yield seq, f"the last row is {seq}, the head says {head[0]}: rows are missing at the end"


def _expected(before: Any, row: tuple[Any, ...]) -> str | None:
    """What a row's chain should be; None if the row cannot be hashed."""
    try:
        return link(bytes.fromhex(before), row[:-1]).hex()
    except (struct.error, TypeError, AttributeError, ValueError):
        return None
