"""The formats that `read` knows. To add one: a line in `FORMATS`.

The names are those of verl 0.9.1, TRL 1.16.0 and prime-rl 0.8.0. What the first two write by
themselves holds no log-probs (verl's `trainer.rollout_data_dir`: input, output, gts, score, step
and the reward function's extras; TRL's `log_completions`: step, prompt, completion, one column per
reward function, advantage): they have to be written into the same rows under the names that the
batch has in the trainer. prime-rl's `trainer.enable_token_export` is complete but for groups,
rewards and versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from trueup.errors import ConfigError, UsageError
from trueup.integrations.dumps.columns import Columns, sample
from trueup.integrations.dumps.dump import Dump, Sample, pack
from trueup.integrations.dumps.files import Rows, files_of, rows_of
from trueup.integrations.dumps.run import read_run
from trueup.records.directory import RunDirectory

RUN = "run"
"""Name of the format of trueup's own runs."""

FORMATS: Mapping[str, Columns] = {
    columns.name: columns
    for columns in (
        Columns(
            name="verl",
            target=("old_log_probs",),
            behaviour=("rollout_log_probs",),
            masks=("response_mask",),
            reward=("score", "token_level_scores"),
            advantage=("advantages",),
            group=("uid", "input"),
            signature=frozenset({"input", "output", "score"}),
        ),
        Columns(
            name="trl",
            target=("old_per_token_logps",),
            behaviour=("sampling_per_token_logps",),
            masks=("completion_mask", "tool_mask"),
            reward=("reward",),
            advantage=("advantage", "advantages"),
            group=("prompt",),
            signature=frozenset({"prompt", "completion", "advantage"}),
        ),
        Columns(
            name="prime-rl",
            target=("trainer_logprobs", "logprobs"),
            behaviour=("inference_logprobs",),
            masks=("loss_mask", "mask"),
            reward=("reward",),
            advantage=("advantages", "advantage"),
            group=("task_id", "problem_id"),
            notes=(
                "trainer_logprobs are of the policy while it is updated: they are the target's "
                "only up to the first optimiser step of a step batch",
            ),
        ),
        Columns(
            name="arrays",
            target=("logp_target",),
            behaviour=("logp_behaviour",),
            masks=("mask",),
            padded=False,
            reward=("reward",),
            advantage=("advantage",),
            group=("group",),
        ),
    )
}
"""Formats with a row per episode, by name."""


def read(path: Path, *, kind: str | None = None, steps: range | None = None) -> Dump:
    """Read a run or a dump.

    Args:
        path: Directory of a run, or a file or folder of a dump.
        kind: `run` or a name of `FORMATS`; None to tell it from what is there.
        steps: Which step batches; None for all.

    Raises:
        UsageError: There is nothing to read at the path, or nothing of the format.
        DataError: It cannot be judged, with the episode and the field.
    """
    if kind is not None and kind not in (RUN, *FORMATS):
        choice = ", ".join((RUN, *FORMATS))
        raise ConfigError(field="--format", rule=f"one of {choice}", value=kind)
    if kind == RUN or (kind is None and RunDirectory(path).ledger.is_file()):
        return read_run(RunDirectory.open(path), steps)
    return _read_dump(path, kind, steps)


def _read_dump(path: Path, kind: str | None, steps: range | None) -> Dump:
    files = files_of(path)
    columns = _known(files[0], rows_of(files[0]), kind)
    found = [s for s in _samples(files, columns) if steps is None or s.step in steps]
    if not found:
        raise UsageError(field="--steps", rule="steps that the dump holds", value=_shown(steps))
    return pack(found, source=columns.name, notes=columns.notes)


def _samples(files: list[Path], columns: Columns) -> Iterator[Sample]:
    for number, file in enumerate(files):
        for index, row in enumerate(rows_of(file)):
            yield sample(row, columns, episode=f"{file.name}[{index}]", step=number)


def _known(file: Path, rows: Rows, kind: str | None) -> Columns:
    if kind is not None:
        return FORMATS[kind]
    names = frozenset(next(rows, {}))
    for columns in FORMATS.values():
        if columns.fits(names):
            return columns
    raise UsageError(
        field="--format",
        rule=f"one of {', '.join((RUN, *FORMATS))}; it cannot be told from the columns of {file}",
        value=", ".join(sorted(names)) or "no row",
    )


def _shown(steps: range | None) -> str:
    return "all of nothing" if steps is None else f"{steps.start}:{steps.stop}"
