"""Names and types of the episode table's columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def episode_schema() -> pa.Schema:
    """One row per segment; lists have one element per token, or per action token."""
    import pyarrow as pa

    integer, single, double, text = pa.int32(), pa.float32(), pa.float64(), pa.string()
    integers, singles = pa.list_(integer), pa.list_(single)
    return pa.schema(
        {
            "run": text,
            "step": integer,
            "episode": text,
            "attempt": integer,
            "task": text,
            "group": integer,
            "segment": integer,
            "parent": integer,
            "status": text,
            "reward": double,
            "reason": text,
            # per token
            "token_ids": integers,
            "action": pa.list_(pa.int8()),
            "turn": integers,
            # per action token
            "logp_behaviour": singles,
            "logp_target": singles,
            "logp_version": singles,
            "kept_mass": singles,
            "advantage": singles,
            "weight": singles,
            "keep": pa.list_(pa.bool_()),
            "lag_in_flight": integers,
            "lag_in_queue": integers,
            "spans": pa.list_(_span()),
            # per episode
            "t_submit": double,
            "t_start": double,
            "t_end": double,
            "turns": pa.list_(_turn()),
        }
    )


def _span() -> pa.DataType:
    import pyarrow as pa

    return pa.struct(
        {
            "start": pa.int32(),
            "stop": pa.int32(),
            "version": pa.int32(),
            "engine": pa.string(),
            "epoch": pa.int32(),
            "precision": pa.string(),
            "kv": pa.string(),
            "context_versions": pa.list_(pa.int32()),
            "temperature": pa.float64(),
            "top_p": pa.float64(),
            "top_k": pa.int32(),
            "logprob_kind": pa.string(),
        }
    )


def _turn() -> pa.DataType:
    import pyarrow as pa

    return pa.struct(
        {
            "t0": pa.float64(),
            "t1": pa.float64(),
            "n_in": pa.int32(),
            "n_out": pa.int32(),
            "tool": pa.string(),
            "tool_s": pa.float64(),
            "tool_status": pa.string(),
        }
    )
