import json
from math import inf, log
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from trueup.errors import ConfigError, DataError, UsageError
from trueup.integrations.dumps.formats import FORMATS, read

VERL = {
    "input": "1 + 1 =",
    "output": "2",
    "score": 1.0,
    "step": 7,
    "uid": "a",
    "rollout_log_probs": [-1.0, -2.0, 0.0, 0.0],
    "old_log_probs": [-1.5, -2.0, -9.0, -9.0],
    "response_mask": [1, 1, 0, 0],
}
TRL = {
    "step": 3,
    "prompt": "p",
    "completion": "c",
    "advantage": 0.5,
    "sampling_per_token_logps": [-1.0, -2.0, -3.0, 0.0],
    "old_per_token_logps": [-1.5, -2.0, -3.0, 0.0],
    "completion_mask": [1, 1, 1, 0],
    "tool_mask": [1, 0, 1, 1],
}
PRIME = {
    "schema_version": 1,
    "step": 2,
    "rank": 0,
    "env_name": "e",
    "token_ids": [5, 6, 7],
    "loss_mask": [False, True, True],
    "advantages": [0.0, 0.25, 0.25],
    "inference_logprobs": [0.0, -1.0, -2.0],
    "trainer_logprobs": [None, -1.5, -2.0],
}
ARRAYS = {"logp_target": [-1.5, -2.0], "logp_behaviour": [-1.0, -2.0], "reward": 1.0, "group": 4}


def lines(path: Path, *rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table(path: Path, *rows) -> Path:
    parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


@pytest.mark.parametrize(
    "row", [VERL, TRL, PRIME, ARRAYS], ids=["verl", "trl", "prime-rl", "arrays"]
)
@pytest.mark.parametrize("write", [lines, table])
def test_each_format_is_known_by_its_columns_and_gives_the_same_gap(tmp_path, row, write):
    path = write(tmp_path / f"x.{'jsonl' if write is lines else 'parquet'}", row, row)
    dump = read(path)
    (gap,) = dump.batches
    tokens = [-1.0, -3.0] if row is TRL else [-1.0, -2.0]  # TRL: the second is a tool's
    target = [-1.5, -3.0] if row is TRL else [-1.5, -2.0]
    assert gap.logp_behaviour.tolist() == tokens * 2
    assert gap.logp_target.tolist() == target * 2
    assert gap.segment_offsets.tolist() == [0, 2, 4]
    assert gap.group.tolist() == [0, 0]
    assert dump.steps == (row.get("step", 0),)
    assert read(path, kind=dump.source).batches[0].log_ratio.equal(gap.log_ratio)


@pytest.mark.parametrize(
    ("row", "source", "reward", "advantage", "missing"),
    [
        (VERL, "verl", 1.0, "group_std", ["no weight versions"]),
        (TRL, "trl", 0.5, "group", ["no rewards", "no weight versions"]),
        (PRIME, "prime-rl", 0.25, "group", ["no rewards", "no group ids", "no weight versions"]),
        (ARRAYS, "arrays", 1.0, "group_std", ["no weight versions"]),
    ],
    ids=["verl", "trl", "prime-rl", "arrays"],
)
def test_what_is_missing_is_said(tmp_path, row, source, reward, advantage, missing):
    dump = read(lines(tmp_path / "x.jsonl", row))
    assert dump.source == source
    assert dump.batches[0].reward.tolist() == [reward]
    assert dump.replay.advantage == advantage
    assert [text.partition(":")[0] for text in dump.missing] == missing


def test_rewards_per_token_are_summed_over_action_tokens(tmp_path):
    row = {k: v for k, v in VERL.items() if k != "score"} | {"token_level_scores": [0, 0.5, 9, 9]}
    assert read(lines(tmp_path / "x.jsonl", row)).batches[0].reward.tolist() == [0.5]


def test_versions_give_lags_and_scored_versions_a_split(tmp_path):
    row = ARRAYS | {"version": [3, 4], "trainer_version": 5, "logp_version": [-1.2, None]}
    dump = read(lines(tmp_path / "x.jsonl", row | {"engine": "b"}, row | {"engine": ["a", "b"]}))
    (gap,) = dump.batches
    assert gap.version.tolist() == [3, 4, 3, 4]
    assert gap.lag.tolist() == [2, 1, 2, 1]
    assert dump.engines == ("a", "b")
    assert gap.engine.tolist() == [1, 1, 0, 1]
    assert gap.logp_version is not None
    assert torch.isnan(gap.logp_version).tolist() == [False, True] * 2
    assert dump.missing == ()


def test_what_a_mask_takes_out_is_taken_out_of_every_column(tmp_path):
    row = {
        "logp_target": [-9.0, -1.0, -2.0],
        "logp_behaviour": [-9.0, -1.5, -2.0],
        "logp_version": [-9.0, -1.2, -2.0],
        "mask": [0, 1, 1],
        "version": [0, 3, 4],
        "trainer_version": 5,
        "engine": ["x", "a", "b"],
        "advantage": [9.0, 0.5, 0.5],
    }
    dump = read(lines(tmp_path / "x.jsonl", row))
    (gap,) = dump.batches
    assert gap.logp_target.tolist() == [-1.0, -2.0]
    assert (gap.version.tolist(), gap.lag.tolist()) == ([3, 4], [2, 1])
    assert (dump.engines, gap.engine.tolist()) == (("a", "b"), [0, 1])
    assert gap.logp_version is not None
    assert gap.logp_version.tolist() == pytest.approx([-1.2, -2.0])
    assert gap.reward.tolist() == [0.5]


def test_an_unknown_version_is_none_and_no_lag(tmp_path):
    (gap,) = read(lines(tmp_path / "x.jsonl", ARRAYS)).batches
    assert (gap.version.tolist(), gap.lag.tolist()) == ([-1, -1], [0, 0])


def test_steps_are_batches_in_order_and_can_be_chosen(tmp_path):
    rows = [ARRAYS | {"step": step, "reward": float(step)} for step in (9, 2, 9, 5)]
    path = lines(tmp_path / "x.jsonl", *rows)
    dump = read(path)
    assert dump.steps == (2, 5, 9)
    assert [gap.reward.tolist() for gap in dump.batches] == [[2.0], [5.0], [9.0, 9.0]]
    assert read(path, steps=range(5, 9)).steps == (5,)
    with pytest.raises(UsageError, match="--steps must be steps that the dump holds, got '0:2'"):
        read(path, steps=range(2))


def test_without_steps_each_file_is_a_batch_in_natural_order(tmp_path):
    for step in (10, 9):
        lines(tmp_path / "d" / f"{step}.jsonl", ARRAYS | {"reward": float(step)})
    dump = read(tmp_path / "d")
    assert [gap.reward.tolist() for gap in dump.batches] == [[9.0], [10.0]]


@pytest.mark.parametrize(
    ("row", "lacks", "message"),
    [
        (VERL, "rollout_log_probs", r"episode x.jsonl\[0\], rollout_log_probs must be present"),
        (VERL, "old_log_probs", r"episode x.jsonl\[0\], old_log_probs must be present"),
        (VERL, "response_mask", r"response_mask must be present, as padding cannot be told"),
        (TRL, "sampling_per_token_logps", r"sampling_per_token_logps must be present"),
        (PRIME, "loss_mask", r"loss_mask or mask must be present"),
        (ARRAYS, "logp_target", r"logp_target must be present, as there is no gap without it"),
    ],
)
def test_what_cannot_be_judged_is_refused(tmp_path, row, lacks, message):
    row = {key: value for key, value in row.items() if key != lacks}
    with pytest.raises(DataError, match=message):
        read(lines(tmp_path / "x.jsonl", row))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logp_target": [-1.0]}, r"episode x.jsonl\[1\], logp_target must be of the length .*, 2"),
        ({"mask": [1]}, r"episode x.jsonl\[1\], mask must be of the length"),
        ({"version": [1]}, r"episode x.jsonl\[1\], version must be of the length"),
        ({"engine": ["a"]}, r"episode x.jsonl\[1\], engine must be of the length"),
        ({"logp_version": [-1.0]}, r"episode x.jsonl\[1\], logp_version must be of the length"),
        ({"logp_behaviour": [0.5, -1.0]}, r"logp_behaviour of episode x.jsonl\[1\] must be <= 0"),
        ({"logp_target": [None, -1.0]}, r"target log-probs of episode x.jsonl\[1\] must be finite"),
        ({"logp_target": "soon"}, r"episode x.jsonl\[1\], logp_target must be numbers"),
        ({"logp_target": [[-1.0, -1.0]]}, r"logp_target must be one number per token"),
        ({"reward": None}, r"reward of episode x.jsonl\[1\] must be given, as it is for other"),
        ({"reward": inf}, r"episode x.jsonl\[1\], reward must be finite"),
        ({"group": None}, r"group of episode x.jsonl\[1\] must be given"),
        ({"version": 6, "trainer_version": 5}, r"trainer_version must be >= version, got -1"),
    ],
)
def test_a_bad_row_is_refused_by_name(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        read(lines(tmp_path / "x.jsonl", ARRAYS, ARRAYS | change))


def test_a_missing_behaviour_log_prob_is_counted_and_never_a_ratio_of_one(tmp_path):
    row = ARRAYS | {"logp_behaviour": [None, -2.0]}
    rows = [row, row | {"logp_behaviour": [inf, -inf]}]
    dump = read(lines(tmp_path / "x.jsonl", *rows))
    assert dump.batches[0].valid.tolist() == [False, True, False, False]
    assert dump.notes[0].startswith("3 of 4 action tokens (75.00%) have no finite behaviour")


def test_log_probs_that_were_rounded_are_flagged(tmp_path):
    exact = -torch.rand(40, generator=torch.Generator().manual_seed(0)) - 0.1
    for name, values in (("bfloat16", exact.bfloat16()), ("float16", exact.half())):
        row = ARRAYS | {"logp_target": exact.tolist(), "logp_behaviour": values.float().tolist()}
        (note,) = read(lines(tmp_path / f"{name}.jsonl", row)).notes
        assert note.startswith(f"the behaviour log-probs are {name} numbers")


def test_prime_rl_says_that_its_trainer_moves(tmp_path):
    path = lines(tmp_path / "token_exports" / "step_2" / "rank_0.jsonl", PRIME)
    (note,) = read(path.parents[1]).notes
    assert note.startswith("trainer_logprobs are of the policy while it is updated")


def test_archives_are_packed_by_lengths_or_padded_with_a_mask(tmp_path):
    packed = {
        "logp_target": np.float32([-1.5, -2.0, -3.0]),
        "logp_behaviour": np.float32([-1.0, -2.0, -3.0]),
        "lengths": np.array([2, 1]),
        "reward": np.array([1.0, 0.0]),
        "group": np.array([7, 7]),
        "version": np.array([1, 2, 2]),
        "trainer_version": np.array(3),
        "step": np.array([4, 4]),
    }
    np.savez(tmp_path / "packed.npz", **packed)
    dump = read(tmp_path / "packed.npz")
    (gap,) = dump.batches
    assert dump.steps == (4,)
    assert gap.segment_offsets.tolist() == [0, 2, 3]
    assert gap.lag.tolist() == [2, 1, 1]
    padded = {
        "rollout_log_probs": np.float32([[-1.0, -2.0], [-3.0, 0.0]]),
        "old_log_probs": np.float32([[-1.5, -2.0], [-3.0, -8.0]]),
        "response_mask": np.array([[1, 1], [1, 0]]),
        "score": np.array([1.0, 0.0]),
        "uid": np.array(["a", "a"]),
    }
    np.savez(tmp_path / "padded.npz", **padded)
    other = read(tmp_path / "padded.npz")
    assert other.source == "verl"
    assert other.batches[0].log_ratio.equal(gap.log_ratio)
    assert other.batches[0].reward.equal(gap.reward)


def test_archives_of_single_tokens_are_read_whichever_way_they_are_meant(tmp_path):
    np.savez(
        tmp_path / "x.npz",
        logp_target=np.float32([-1.0, -2.0]),
        logp_behaviour=np.float32([-1.0, -2.0]),
        lengths=np.array([1, 1]),
        reward=np.array([1.0, 0.0]),
        group=np.array([3, 3]),
        step=np.array([5, 5]),
    )
    dump = read(tmp_path / "x.npz")
    assert (dump.steps, dump.batches[0].reward.tolist()) == ((5,), [1.0, 0.0])
    assert dump.batches[0].group.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"logp_target": np.zeros(3), "logp_behaviour": np.zeros(3)}, "lengths must be given"),
        (
            {"logp_target": np.zeros(3), "logp_behaviour": np.zeros(2), "lengths": np.array([3])},
            r"logp_behaviour must be of length 1 \(episodes\) or 3 \(tokens\), got 2",
        ),
    ],
)
def test_archives_that_do_not_fit_are_refused(tmp_path, columns, message):
    np.savez(tmp_path / "x.npz", **columns)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "x.npz")


def test_a_pickle_in_an_archive_is_not_opened(tmp_path):
    np.savez(tmp_path / "x.npz", logp_target=np.array([{}], dtype=object))
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "x.npz")


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet", "x.npz"])
def test_a_damaged_file_is_named(tmp_path, name):
    for content in (b"[1, 2", b"[1, 2]", b"\xff\xfe\x00"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name} cannot be read"):
            read(tmp_path / name, kind="arrays")


def test_what_is_no_dump_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"path must be a run, or a file or folder of one of"):
        read(tmp_path / "absent")
    lines(tmp_path / "x.jsonl", {"text": "a"})
    with pytest.raises(UsageError, match=r"--format must be one of run, verl.*got 'text'"):
        read(tmp_path)
    table(tmp_path / "x.parquet", ARRAYS)
    with pytest.raises(UsageError, match=r"\.jsonl, \.parquet\)"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="--format must be one of run, verl"):
        read(tmp_path, kind="slime")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UsageError, match="no row"):
        read(tmp_path / "empty.jsonl")


def test_the_ratio_is_target_minus_behaviour_in_every_format(tmp_path):
    for columns in FORMATS.values():
        row = {columns.target[0]: [log(0.5)], columns.behaviour[0]: [log(0.25)]}
        row |= {name: [1] for name in columns.masks}
        gap = read(lines(tmp_path / "x.jsonl", row), kind=columns.name).batches[0]
        assert gap.log_ratio.exp().tolist() == pytest.approx([2.0])
