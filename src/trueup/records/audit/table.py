"""What must hold between the episode table and the ledger.

The table is read column by column and only as far as needed: per-token values become Python
objects only for rows in which something is already known to be wrong.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trueup.errors import DataError
from trueup.records.audit.finding import Finding
from trueup.records.audit.history import Attempt, History, SpanKey, merged, spans_of
from trueup.records.directory import RunDirectory
from trueup.records.schema import Event
from trueup.records.tokens import read_step

if TYPE_CHECKING:
    import pyarrow as pa

_COLUMNS = (
    *("episode", "attempt", "group", "segment", "status", "reward", "reason"),
    *("action", "logp_behaviour", "spans", "keep"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """One row of the table, its lists reduced to what the checks ask for."""

    index: int
    facts: tuple[int, int, str, float | None]
    """Attempt, group, status, reward."""
    reason: str | None
    actions: int
    spans: list[tuple[SpanKey, int]]
    logps: int
    """Number of behaviour log-probs."""
    nonfinite: list[int]
    """Action tokens whose behaviour log-prob is not finite."""
    keep: Any
    """Arrow list, read on demand."""


def table_agrees(history: History, directory: RunDirectory) -> Iterator[Finding]:
    """The rows of every surviving step are the episodes it trained, token for token.

    Also I8 (every kept token has a finite behaviour log-prob), I5 under `mask` (no kept token is
    beyond the bound), and I1 for what was claimed but not trained (it must say why).
    """
    seen: dict[tuple[str, int], int] = {}
    for step, commit in history.steps.items():
        try:
            episodes = _segments_by_episode(read_step(directory, step, _COLUMNS))
        except DataError as error:
            yield _finding("table", "a step's episode table cannot be read", commit, str(error))
            continue
        for episode, segments in episodes.items():
            for segment in segments:
                key = (episode, segment.index)
                if key in seen:
                    detail = f"{episode} segment {segment.index}, also in step {seen[key]}"
                    yield _finding("table", "a segment is in the table twice", commit, detail)
                seen[key] = step
        yield from _step_agrees(history, commit, episodes)


def _step_agrees(
    history: History, commit: Event, episodes: dict[str, list[_Segment]]
) -> Iterator[Finding]:
    trained = set(commit.payload["episodes"])
    for episode in sorted(trained - episodes.keys()):
        yield _finding("table", "a trained episode has no row", commit, episode)
    for episode, segments in episodes.items():
        for segment in segments:
            if segment.reason is None and episode not in trained:
                rule = "a row without a reason was not trained"
                yield _finding("table", rule, commit, episode)
            elif segment.reason is not None and episode in trained:
                rule = "a row of a trained episode has a reason for leaving it out"
                yield _finding("table", rule, commit, f"{episode}: {segment.reason}")
        attempt = history.attempts.get(episode)
        if episode in trained and attempt and attempt.finish:
            yield from _episode_agrees(commit, attempt, attempt.finish, segments)
            yield from _tokens_hold(history, commit, episode, segments)
    for claim in history.claims_of(commit):
        for episode in claim.payload["episodes"]:
            if episode not in trained and episode not in episodes:
                rule = "a claimed episode was neither trained nor left out with a reason"
                yield _finding("I1", rule, claim, episode)


def _episode_agrees(
    commit: Event, attempt: Attempt, finish: Event, segments: list[_Segment]
) -> Iterator[Finding]:
    def finding(what: str, found: object, expected: object) -> Finding:
        rule = f"the table's {what} differs from the ledger's"
        detail = f"{attempt.id}: {found}, ledger (row {finish.seq}) {expected}"
        return _finding("table", rule, commit, detail)

    payload = finish.payload
    indices = [segment.index for segment in segments]
    if indices != list(range(len(segments))):
        yield finding("segments", indices, "0, 1, ... each once")
    facts = (finish.attempt, finish.group, payload["status"], payload.get("reward"))
    for segment in segments[:1]:
        if segment.facts != facts:
            yield finding("attempt, group, status or reward", segment.facts, facts)
    actions = sum(segment.actions for segment in segments)
    if actions != payload["action_tokens"]:
        yield finding("number of action tokens", actions, payload["action_tokens"])
    spans = merged(span for segment in segments for span in segment.spans)
    if spans != merged(spans_of(finish)):
        yield finding("provenance", spans, merged(spans_of(finish)))


def _tokens_hold(
    history: History, commit: Event, episode: str, segments: list[_Segment]
) -> Iterator[Finding]:
    rules = history.rules_at(commit.seq)
    oldest = -math.inf
    if rules.consume == "mask":
        # The version that the step started from, less the bound.
        oldest = history.version_at(commit.seq) - rules.bound
    for segment in segments:
        where = f"{episode} segment {segment.index}"
        if segment.logps != segment.actions:
            detail = f"{where}: {segment.logps} log-probs of {segment.actions} action tokens"
            yield _finding("I8", "log-probs and action tokens differ in number", commit, detail)
        stale = _tokens_older_than(oldest, segment.spans)
        if not stale and not segment.nonfinite:
            continue
        keep = segment.keep.as_py() or [True] * segment.actions
        if len(keep) < segment.actions:
            yield _finding("table", "keep flags are fewer than action tokens", commit, where)
            continue
        for token in [i for i in stale if keep[i]][:1]:
            detail = f"{where}, action token {token}"
            yield _finding("I5", "a token beyond the bound is not masked", commit, detail)
        for token in [i for i in segment.nonfinite if keep[i]][:1]:
            detail = f"{where}, action token {token}"
            rule = "a kept token has no finite behaviour log-prob"
            yield _finding("I8", rule, commit, detail)


def _tokens_older_than(version: float, spans: list[tuple[SpanKey, int]]) -> list[int]:
    found: list[int] = []
    position = 0
    for (sampled_by, _, _), tokens in spans:
        if sampled_by < version:
            found.extend(range(position, position + tokens))
        position += tokens
    return found


def _segments_by_episode(table: pa.Table) -> dict[str, list[_Segment]]:
    names = ("episode", "attempt", "group", "segment", "status", "reward", "reason", "spans")
    plain = {name: table[name].to_pylist() for name in names}
    keep = table["keep"].combine_chunks()
    actions = _sums(table["action"].combine_chunks())
    logps, nonfinite = _nonfinite(table["logp_behaviour"].combine_chunks())
    episodes: dict[str, list[_Segment]] = defaultdict(list)
    for i, episode in enumerate(plain["episode"]):
        spans = [
            ((span["version"], span["engine"], span["epoch"]), span["stop"] - span["start"])
            for span in plain["spans"][i] or ()
        ]
        facts = (plain["attempt"][i], plain["group"][i], plain["status"][i], plain["reward"][i])
        segment = _Segment(
            index=plain["segment"][i],
            facts=facts,
            reason=plain["reason"][i],
            actions=actions.get(i, 0),
            spans=spans,
            logps=logps[i] or 0,
            nonfinite=nonfinite.get(i, []),
            keep=keep[i],
        )
        episodes[episode].append(segment)
    for segments in episodes.values():
        segments.sort(key=lambda segment: segment.index)
    return episodes


def _sums(lists: pa.Array) -> dict[int, int]:
    """Sum of each list that is not empty, by row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    flat = {"row": pc.list_parent_indices(lists), "value": pc.list_flatten(lists)}
    sums = pa.table(flat).group_by("row").aggregate([("value", "sum")])
    return dict(zip(sums["row"].to_pylist(), sums["value_sum"].to_pylist(), strict=True))


def _nonfinite(lists: pa.Array) -> tuple[list[int | None], dict[int, list[int]]]:
    """Length of each list, and by row the positions of its values that are not finite."""
    import pyarrow.compute as pc

    bad = pc.invert(pc.fill_null(pc.is_finite(pc.list_flatten(lists)), False))
    parents = pc.list_parent_indices(lists)
    lengths = pc.list_value_length(lists).to_pylist()
    starts, total = [], 0
    for length in lengths:
        starts.append(total)
        total += length or 0
    found: dict[int, list[int]] = defaultdict(list)
    for index in pc.indices_nonzero(bad).to_pylist():
        row = parents[index].as_py()
        found[row].append(index - starts[row])
    return lengths, found


def _finding(invariant: str, rule: str, commit: Event, detail: str) -> Finding:
    where = f"step {commit.payload['step']}, {detail}"
    return Finding(invariant=invariant, rule=rule, row=commit.seq, detail=where)
