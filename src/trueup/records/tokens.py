"""The episode table: every token of a run with everything known about it, one file per step.

One row per segment, list columns: `token_ids`, `action` and `turn` have one element per token,
everything else per *action* token. A column that was not computed is null, not zero. Episodes that
were dropped or failed are rows too, with the reason; one without any segment is one row with
segment -1. What belongs to the episode as a whole (`turns`) stands in its first row only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.errors import DataError
from trueup.records.columns import episode_schema
from trueup.records.directory import RunDirectory
from trueup.records.files import write_atomic
from trueup.types import Episode, Segment, Span, Turn

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpisodeRow:
    """An episode and what a step computed for its action tokens.

    The columns hold the action tokens of all segments in order ([n], any sequence, numpy array or
    `array.array`); None where not computed.

    Raises:
        DataError: A column or a segment's log-probs differ in length from the action tokens, or
            spans do not cover them.
    """

    episode: Episode
    reason: str | None = None
    """Why it was dropped or failed; None if it was trained."""
    logp_target: Sequence[float] | None = None
    """Log-probs under the policy that the step updated."""
    logp_version: Sequence[float] | None = None
    """Log-probs under the version that sampled the token, computed by the trainer."""
    kept_mass: Sequence[float] | None = None
    """Mass of the support that was sampled from."""
    advantage: Sequence[float] | None = None
    weight: Sequence[float] | None = None
    keep: Sequence[bool] | None = None
    lag_in_flight: Sequence[int] | None = None
    """Versions published while the episode ran, after the token was sampled."""
    lag_in_queue: Sequence[int] | None = None
    """Versions published while the finished episode waited."""

    def __post_init__(self) -> None:
        n = 0
        for index, segment in enumerate(self.episode.segments):
            here = sum(segment.action)
            lengths = (len(segment.action), len(segment.turn))
            self._check(f"segment {index}: action and turn", lengths, (len(segment.token_ids),) * 2)
            self._check(f"segment {index}: logp_behaviour", len(segment.logp_behaviour), here)
            edges = [0, *(edge for s in segment.spans for edge in (s.start, s.stop)), here]
            self._check(f"segment {index}: edges of the spans", edges[1::2], edges[::2])
            n += here
        for name in _COMPUTED:
            values = getattr(self, name)
            if values is not None:
                self._check(name, len(values), n)

    def _check(self, what: str, found: object, wanted: object) -> None:
        if found != wanted:
            field = f"episode {self.episode.id}, {what}"
            raise DataError(field=field, rule=f"of length {wanted}", value=found)


_COMPUTED = tuple(f.name for f in fields(EpisodeRow) if f.name not in ("episode", "reason"))


def write_step(directory: RunDirectory, step: int, rows: Sequence[EpisodeRow]) -> Path:
    """Write the episodes of one step, replacing the file of an earlier life of the run.

    Returns:
        The file, whole on the disk.

    Raises:
        OSError: The disk is full; no partial file is left.
    """
    import pyarrow as pa
    from pyarrow import parquet

    records = [record for row in rows for record in _records(row)]
    columns: dict[str, Any] = {}
    schema = episode_schema()
    for field in schema:
        if field.name == "run":
            columns["run"] = pa.array([directory.name] * len(records), pa.string())
        elif field.name == "step":
            columns["step"] = pa.array([step] * len(records), pa.int32())
        else:
            values = [record[field.name] for record in records]
            columns[field.name] = _column(values, field.type)
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table(columns, schema=schema), sink, compression="zstd")
    path = directory.episode_file(step)
    write_atomic(path, memoryview(sink.getvalue()))
    return path


def steps_written(directory: RunDirectory) -> list[int]:
    """Steps that have a file, in order."""
    names = (path.stem.removeprefix("step-") for path in directory.episodes.glob("step-*.parquet"))
    return sorted(int(name) for name in names if name.isdigit())


def read_step(directory: RunDirectory, step: int, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of one step.

    Raises:
        DataError: The file is missing, damaged, or of other columns.
    """
    import pyarrow as pa
    from pyarrow import parquet

    path = directory.episode_file(step)
    schema = episode_schema()
    wanted = schema.names if columns is None else list(columns)
    try:
        table = parquet.ParquetFile(path).read(columns=wanted).select(wanted)
        schema = pa.schema([schema.field(name) for name in wanted])
    except (OSError, pa.ArrowException, KeyError) as error:
        why = str(error)
    else:
        if table.schema.equals(schema):
            return table
        why = f"its columns are {table.schema.to_string(show_schema_metadata=False)}"
    message = f"episode table {path} cannot be read: {why}"
    raise DataError(message, field="episodes", rule="a readable table")


def iter_steps(
    directory: RunDirectory, columns: Sequence[str] | None = None
) -> Iterator[tuple[int, pa.Table]]:
    """(step, rows) for every file, in order; see `read_step` for the errors."""
    for step in steps_written(directory):
        yield step, read_step(directory, step, columns)


def read_steps(directory: RunDirectory, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of all steps as one table; see `read_step` for the errors."""
    import pyarrow as pa

    tables = [table for _, table in iter_steps(directory, columns)]
    if tables:
        return pa.concat_tables(tables)
    empty = episode_schema().empty_table()
    return empty if columns is None else empty.select(list(columns))


# ---- episode -> records, one per segment ---------------------------------------------------------


def _records(row: EpisodeRow) -> Iterator[dict[str, Any]]:
    episode = row.episode
    common = {
        "episode": episode.id,
        "attempt": episode.attempt,
        "task": episode.task,
        "group": episode.group,
        "status": str(episode.status),
        "reward": episode.reward,
        "reason": row.reason,
        "t_submit": episode.t_submit,
        "t_start": episode.t_start,
        "t_end": episode.t_end,
    }
    turns: list[dict[str, Any]] | None = [_turn(turn) for turn in episode.turns]
    offset = 0
    for index, segment in enumerate(episode.segments or (_NO_SEGMENT,)):
        stop = offset + len(segment.logp_behaviour)
        record = common | {
            "segment": index if episode.segments else -1,
            "parent": segment.parent,
            "token_ids": segment.token_ids,
            "action": segment.action,
            "turn": segment.turn,
            "logp_behaviour": segment.logp_behaviour,
            "spans": [_span(span) for span in segment.spans],
            "turns": turns,
        }
        for name in _COMPUTED:
            values = getattr(row, name)
            record[name] = None if values is None else values[offset:stop]
        yield record
        offset, turns = stop, None


_NO_SEGMENT = Segment(
    token_ids=array("i"), action=array("b"), turn=array("i"), logp_behaviour=array("f"), spans=()
)


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "t0": turn.t_start,
        "t1": turn.t_end,
        "n_in": turn.tokens_in,
        "n_out": turn.tokens_out,
        "tool": turn.tool,
        "tool_s": turn.tool_s,
        "tool_status": turn.tool_status,
    }


def _span(span: Span) -> dict[str, Any]:
    record = {f.name: getattr(span, f.name) for f in fields(Span)}
    return record | {
        "kv": str(span.kv),
        "context_versions": list(span.context_versions),
        "logprob_kind": str(span.logprob_kind),
    }


# ---- records -> Arrow ----------------------------------------------------------------------------


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    if not pa.types.is_list(kind) or pa.types.is_struct(kind.value_type):
        return pa.array(values, kind)
    # Lists of numbers go over as one buffer instead of one Python object per token.
    element = kind.value_type
    stored = pa.int8() if pa.types.is_boolean(element) else element
    code = {pa.int8(): "b", pa.int32(): "i", pa.float32(): "f"}[stored]
    offsets: list[int | None] = []
    parts: list[bytes] = []
    total = 0
    for value in values:
        # A null offset makes the list null.
        offsets.append(None if value is None else total)
        if value is not None:
            total += len(value)
            parts.append(_bytes(value, code))
    flat = pa.Array.from_buffers(stored, total, [None, pa.py_buffer(b"".join(parts))])
    lists = pa.ListArray.from_arrays(pa.array([*offsets, total], pa.int32()), flat.cast(element))
    return lists.cast(kind)


def _bytes(values: Any, code: str) -> bytes:
    """Numbers as the bytes of an `array.array(code)`."""
    if isinstance(values, array) and values.typecode == code:
        return values.tobytes()
    return array(code, getattr(values, "tolist", lambda: values)()).tobytes()
