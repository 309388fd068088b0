import math
from array import array

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from trueup.errors import DataError
from trueup.records.directory import RunDirectory
from trueup.records.tokens import (
    EpisodeRow,
    iter_steps,
    read_step,
    read_steps,
    steps_written,
    write_step,
)
from trueup.types import (
    Episode,
    EpisodeStatus,
    Failure,
    FailureKind,
    KVState,
    Segment,
    Span,
    Turn,
)


def span(start, stop, version, **more):
    fixed = {"engine": "engine-0", "epoch": 1, "precision": "float32"}
    return Span(start=start, stop=stop, version=version, **fixed, **more)


ROOT = Segment(
    token_ids=array("i", [5, 6, 7, 8, 9]),
    action=array("b", [0, 1, 1, 0, 1]),
    turn=array("i", [0, 0, 0, 1, 1]),
    logp_behaviour=array("f", [-0.5, math.nan, -2.0]),
    spans=(
        span(0, 1, 3),
        span(1, 3, 4, kv=KVState.KEPT, context_versions=(3, 4), temperature=0.5, top_k=7),
    ),
)
BRANCH = Segment(
    token_ids=array("i", [5, 1]),
    action=array("b", [0, 1]),
    turn=array("i", [0, 2]),
    logp_behaviour=array("f", [-1.0]),
    spans=(span(0, 1, 4),),
    parent=0,
)


def episode(name="e0", segments=(ROOT, BRANCH), **changes):
    values = {
        "task": "bug-1",
        "group": 4,
        "member": 2,
        "attempt": 1,
        "turns": (
            Turn(t_start=1.0, t_end=2.0, tokens_in=1, tokens_out=2, tool="read", tool_s=0.5),
        ),
        "status": EpisodeStatus.DONE,
        "reward": 1.0,
        "t_submit": 0.5,
        "t_start": 1.0,
        "t_end": 3.0,
        **changes,
    }
    return Episode(id=name, segments=segments, **values)


FAILED = episode(
    "lost",
    segments=(),
    turns=(),
    status=EpisodeStatus.FAILED,
    reward=None,
    failure=Failure(kind=FailureKind.ENVIRONMENT, reason="worker_lost"),
)


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(tmp_path, "run-1")


def test_every_token_comes_back_with_all_that_was_known_about_it(directory):
    row = EpisodeRow(
        episode=episode(),
        logp_target=np.array([-0.5, -1.5, -2.5, -1.0]),
        weight=array("f", [1.0, 2.0, 0.0, 1.5]),
        keep=np.array([True, True, False, True]),
        lag_in_flight=[1, 0, 0, 0],
    )
    write_step(directory, 7, [row])
    root, branch = read_step(directory, 7).to_pylist()
    assert (root["run"], root["step"], root["episode"], root["attempt"]) == ("run-1", 7, "e0", 1)
    assert (root["task"], root["group"], root["status"], root["reward"]) == ("bug-1", 4, "done", 1)
    assert (root["segment"], root["parent"], branch["segment"], branch["parent"]) == (0, -1, 1, 0)
    assert root["token_ids"] == [5, 6, 7, 8, 9]
    assert root["action"] == [0, 1, 1, 0, 1]
    assert root["turn"] == [0, 0, 0, 1, 1]
    assert root["logp_behaviour"][::2] == [-0.5, -2.0]
    assert math.isnan(root["logp_behaviour"][1])
    assert (root["logp_target"], branch["logp_target"]) == ([-0.5, -1.5, -2.5], [-1.0])
    assert (root["weight"], branch["weight"]) == ([1.0, 2.0, 0.0], [1.5])
    assert (root["keep"], branch["keep"]) == ([True, True, False], [True])
    assert (root["lag_in_flight"], branch["lag_in_flight"]) == ([1, 0, 0], [0])
    assert root["spans"][1] == {
        "start": 1,
        "stop": 3,
        "version": 4,
        "engine": "engine-0",
        "epoch": 1,
        "precision": "float32",
        "kv": "kept",
        "context_versions": [3, 4],
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 7,
        "logprob_kind": "exact",
    }
    turn = {"t0": 1.0, "t1": 2.0, "n_in": 1, "n_out": 2}
    assert root["turns"] == [{**turn, "tool": "read", "tool_s": 0.5, "tool_status": ""}]
    assert branch["turns"] is None
    assert (root["t_submit"], root["t_start"], root["t_end"]) == (0.5, 1.0, 3.0)


def test_what_was_not_computed_is_null_and_not_zero(directory):
    write_step(directory, 0, [EpisodeRow(episode=episode())])
    (root, _) = read_step(directory, 0).to_pylist()
    for name in ("logp_target", "logp_version", "kept_mass", "advantage", "weight", "keep"):
        assert root[name] is None
    assert root["lag_in_flight"] is root["lag_in_queue"] is root["reason"] is None


def test_rows_with_and_without_a_column_share_a_file(directory):
    rows = [
        EpisodeRow(episode=episode("a", (BRANCH,)), advantage=[0.25]),
        EpisodeRow(episode=episode("b", (BRANCH,))),
        EpisodeRow(episode=FAILED, reason="environment: worker_lost"),
        EpisodeRow(episode=episode("c", (BRANCH,)), advantage=[-0.25]),
    ]
    write_step(directory, 0, rows)
    assert read_step(directory, 0)["advantage"].to_pylist() == [[0.25], None, None, [-0.25]]


def test_a_failed_episode_is_a_row_with_its_reason_and_no_tokens(directory):
    write_step(directory, 0, [EpisodeRow(episode=FAILED, reason="worker_lost")])
    (row,) = read_step(directory, 0).to_pylist()
    assert (row["segment"], row["status"], row["reason"]) == (-1, "failed", "worker_lost")
    assert row["reward"] is None
    assert row["token_ids"] == row["spans"] == row["turns"] == []


def test_steps_are_read_in_order_and_a_step_written_again_replaces_the_old(directory):
    for step, name in [(10, "late"), (2, "old"), (2, "new")]:
        write_step(directory, step, [EpisodeRow(episode=episode(name, (BRANCH,)))])
    assert steps_written(directory) == [2, 10]
    assert read_steps(directory, ["episode"]).to_pylist() == [
        {"episode": "new"},
        {"episode": "late"},
    ]
    assert [(step, table.num_rows) for step, table in iter_steps(directory)] == [(2, 1), (10, 1)]


def test_a_run_without_steps_is_an_empty_table(directory):
    assert read_steps(directory).num_rows == 0
    assert read_steps(directory, ["step", "episode"]).column_names == ["step", "episode"]


def test_a_step_without_episodes_is_an_empty_file(directory):
    write_step(directory, 0, [])
    assert read_step(directory, 0).num_rows == 0


def test_no_partial_file_is_left_beside_the_table(directory):
    path = write_step(directory, 0, [EpisodeRow(episode=episode())])
    assert list(directory.episodes.iterdir()) == [path]


def test_a_column_of_another_length_than_the_action_tokens_is_refused():
    with pytest.raises(DataError, match=r"episode e0, weight must be of length 4, got 3"):
        EpisodeRow(episode=episode(), weight=[1.0, 1.0, 1.0])


def changed(segment, **changes):
    values = {name: getattr(segment, name) for name in Segment.__slots__}
    return Segment(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"logp_behaviour": array("f", [-1.0, -1.0])}, "logp_behaviour"),
        ({"action": array("b", [0, 1])}, "action and turn"),
        ({"spans": (span(0, 1, 3),)}, "edges of the spans"),
        ({"spans": (span(0, 2, 3), span(1, 3, 4))}, "edges of the spans"),
    ],
)
def test_a_segment_whose_parts_disagree_in_length_is_refused_with_the_episode(changes, what):
    with pytest.raises(DataError, match=f"episode e0, segment 0: {what}"):
        EpisodeRow(episode=episode(segments=(changed(ROOT, **changes),)))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"x" * 1000])
def test_a_damaged_file_is_a_typed_error(directory, content):
    directory.episode_file(3).write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        read_step(directory, 3)


def test_a_column_that_the_table_does_not_have_is_a_typed_error(directory):
    write_step(directory, 0, [EpisodeRow(episode=episode())])
    with pytest.raises(DataError, match="cannot be read"):
        read_step(directory, 0, ["colour"])


def test_a_table_of_other_types_is_a_typed_error(directory):
    path = write_step(directory, 0, [EpisodeRow(episode=episode())])
    table = read_step(directory, 0)
    index = table.column_names.index("episode")
    parquet.write_table(table.set_column(index, "episode", pa.array([1, 2])), path)
    with pytest.raises(DataError, match="its columns are episode: int64"):
        read_step(directory, 0, ["episode"])
