"""Stored completions: of a run of ours, or one JSON object per line.

A line holds `prompt_ids`, `token_ids` and `logps` (null where there is none), and may hold
`version`, `temperature`, `top_p`, `top_k`, `precision` and `max_tokens`. Of a run, the turns that
one version sampled are taken.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trueup.diagnosis.rollouts import Rollouts
from trueup.errors import DataError, UsageError
from trueup.records.directory import RunDirectory
from trueup.records.tokens import iter_steps
from trueup.types import Completion, FinishReason, GenerateRequest, SamplingParams, Span

_COLUMNS = ("episode", "attempt", "segment", "token_ids", "action", "logp_behaviour", "spans")
_MOST = 2000
"""Completions that are read."""


def read(path: Path) -> tuple[Rollouts, str]:
    """Read completions, and the precision that their spans name.

    Raises:
        UsageError: Nothing is there, or it holds no completion.
        DataError: A line is no completion.
    """
    found = list(_of_run(RunDirectory.open(path)) if path.is_dir() else _of_lines(path))
    if not found:
        raise UsageError(field="--dump", rule="with at least one completion", value=str(path))
    newest = max(completion.spans[0].version for _, completion in found)
    kept = [(r, c) for r, c in found if {s.version for s in c.spans} == {newest}][:_MOST]
    rollouts = Rollouts(requests=tuple(r for r, _ in kept), completions=tuple(c for _, c in kept))
    return rollouts, rollouts.completions[0].spans[0].precision


Pairs = Iterator[tuple[GenerateRequest, Completion]]


def _of_lines(path: Path) -> Pairs:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(field="--dump", rule="a readable file", value=str(error)) from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _of_line(line, f"{path.name}, line {number}")


def _of_line(line: str, where: str) -> tuple[GenerateRequest, Completion]:
    try:
        record = json.loads(line)
        ids, prompt = array("i", record["token_ids"]), array("i", record["prompt_ids"])
        logps = array("f", [math.nan if x is None else x for x in record["logps"]])
        span = Span(
            start=0,
            stop=len(ids),
            version=int(record.get("version", 0)),
            engine="dump",
            epoch=0,
            precision=str(record.get("precision", "bfloat16")),
            temperature=float(record.get("temperature", 1.0)),
            top_p=float(record.get("top_p", 1.0)),
            top_k=int(record.get("top_k", 0)),
        )
        limit = int(record.get("max_tokens", len(ids)))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(
            field=where, rule="an object with prompt_ids, token_ids, logps", value=repr(error)
        ) from None
    if not prompt or not ids:
        raise DataError(field=where, rule="with a prompt and a token", value="none")
    return _pair(where, prompt, ids, logps, (span,), limit)


def _of_run(run: RunDirectory) -> Pairs:
    for _, table in iter_steps(run, _COLUMNS):
        for row in table.to_pylist():
            yield from _turns(row)


def _turns(row: Mapping[str, Any]) -> Pairs:
    """The runs of action tokens of a segment, each behind all that came before it."""
    ids, flags = row["token_ids"], row["action"]
    begin = taken = 0
    while begin < len(ids):
        if not flags[begin]:
            begin += 1
            continue
        end = next((i for i in range(begin, len(ids)) if not flags[i]), len(ids))
        stop = taken + end - begin
        over = [s for s in row["spans"] if s["stop"] > taken and s["start"] < stop]
        spans = tuple(_cut(span, taken, stop) for span in over)
        yield _pair(
            f"{row['episode']}-{row['attempt']}-{row['segment']}-{begin}",
            array("i", ids[:begin]),
            array("i", ids[begin:end]),
            array("f", row["logp_behaviour"][taken:stop]),
            spans,
            end - begin,
        )
        begin, taken = end, stop


def _cut(span: Mapping[str, Any], start: int, stop: int) -> Span:
    """The part of a stored span that lies within a turn."""
    return Span(
        start=max(span["start"], start) - start,
        stop=min(span["stop"], stop) - start,
        version=span["version"],
        engine=span["engine"],
        epoch=span["epoch"],
        precision=span["precision"],
        temperature=span["temperature"],
        top_p=span["top_p"],
        top_k=span["top_k"],
    )


def _pair(
    name: str,
    prompt: array[int],
    ids: array[int],
    logps: array[float],
    spans: tuple[Span, ...],
    limit: int,
) -> tuple[GenerateRequest, Completion]:
    first = spans[0]
    sampling = SamplingParams(
        max_tokens=limit,
        stop_ids=(),
        temperature=first.temperature,
        top_p=first.top_p,
        top_k=first.top_k,
    )
    completion = Completion(
        session=name,
        token_ids=ids,
        logps=logps,
        spans=spans,
        finish=FinishReason.LENGTH,
        tokens_prefilled=len(prompt),
        tokens_cached=0,
        tokens_recomputed=0,
        t_submit=0.0,
        t_start=0.0,
        t_end=0.0,
    )
    return GenerateRequest(session=name, prompt_ids=prompt, sampling=sampling), completion
