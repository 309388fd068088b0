"""What must hold of attempts and groups: nothing lost, nothing twice, no failure trained.

Each check is pure and yields `Finding`s; none needs another to have passed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from trueup.records.audit.finding import Finding
from trueup.records.audit.history import Attempt, History, succeeded
from trueup.records.schema import Event

CLOSE_REASONS = ("complete", "partial", "timeout", "failed", "zero_variance")
DROP_REASONS = ("stale", "failed", "zero_variance", "timeout", "run_end", "resume")


def attempts_are_conserved(history: History) -> Iterator[Finding]:
    """I1: issued = trained + dropped, with a reason + failed + left over, each exactly once."""
    for episode, count in Counter(e.episode for e in history.events["issue"]).items():
        if count > 1:
            rule = "an episode id is issued more than once"
            issue = history.attempts[episode].issue
            yield _finding("I1", rule, issue, f"{episode}, {count} times")
    yield from _finishes_match_issues(history)
    yield from _consumers_name_finished_attempts(history)
    yield from _attempts_end_once(history)
    for step, commit in history.steps.items():
        claimed = {e for claim in history.claims_of(commit) for e in claim.payload["episodes"]}
        for episode in commit.payload["episodes"]:
            if episode not in claimed:
                rule = "an episode is trained without having been claimed"
                yield _finding("I1", rule, commit, f"{episode} in step {step}")


def _finishes_match_issues(history: History) -> Iterator[Finding]:
    for event in history.events["finish"]:
        attempt = history.attempts.get(event.episode)
        if attempt is None or attempt.issue.seq > event.seq:
            rule = "a finish has no issue before it"
        elif attempt.finish is not event:
            rule = "an attempt finishes twice"
        elif (event.attempt, event.group) != (attempt.issue.attempt, attempt.issue.group):
            rule = "a finish is of another attempt or group than its issue"
        else:
            continue
        yield _finding("I1", rule, event, event.episode)


def _consumers_name_finished_attempts(history: History) -> Iterator[Finding]:
    for event in [*history.events["claim"], *history.events["drop"]]:
        for episode in event.payload["episodes"]:
            attempt = history.attempts.get(episode)
            if attempt is None or attempt.issue.seq > event.seq:
                rule = f"a {event.kind} names an attempt that was not issued"
            elif attempt.issue.group != event.group:
                rule = f"a {event.kind} names an attempt of another group"
            elif event.kind == "claim" and history.life(event.seq) != attempt.life:
                rule = "a claim names an attempt that a resume had ended"
            elif event.kind == "claim" and not (attempt.finish and attempt.finish.seq < event.seq):
                rule = "a claim names an attempt that had not finished"
            else:
                continue
            yield _finding("I1", rule, event, episode)
        if event.kind == "drop" and event.payload.get("reason") not in DROP_REASONS:
            detail = f"group {event.group}: {event.payload.get('reason')!r}"
            yield _finding("I1", "a drop has no reason", event, detail)


def _attempts_end_once(history: History) -> Iterator[Finding]:
    # A drop for a resume is about the life before, where its group may have the same number.
    drops = [event for event in history.events["drop"] if event.payload.get("reason") != "resume"]
    removals = [*history.events["claim"], *drops]
    gone = {(history.life(event.seq), event.group): event for event in removals}
    for attempt in history.attempts.values():
        ends = sorted([*attempt.claims, *attempt.drops], key=lambda event: event.seq)
        if len(ends) > 1 and attempt.drops:
            rule = "an attempt is dropped and claimed, or dropped twice"
            yield _finding("I1", rule, ends[1], attempt.id)
        if attempt.ok and not attempt.late and not ends and attempt.group in gone:
            rule = "a finished attempt is neither in its group's claim nor dropped"
            yield _finding("I1", rule, gone[attempt.group], attempt.id)


def nothing_is_trained_twice(history: History) -> Iterator[Finding]:
    """I2: an episode is in at most one surviving committed step, once."""
    trained: dict[str, int] = {}
    for step, commit in history.steps.items():
        for episode in commit.payload["episodes"]:
            if episode in trained:
                detail = f"{episode} in steps {trained[episode]} and {step}"
                yield _finding("I2", "an episode is trained twice", commit, detail)
            trained[episode] = step
    for attempt in history.attempts.values():
        if len(attempt.claims) > 1:
            yield _finding("I2", "an episode is claimed twice", attempt.claims[1], attempt.id)


def groups_are_closed(history: History) -> Iterator[Finding]:
    """I3: a group closes once, with a reason, and its members are there or explained."""
    for event in [*history.events["claim"], *history.events["drop"]]:
        closes = history.closes.get((history.life(event.seq), event.group), ())
        cut = event.kind == "drop" and event.payload.get("reason") in ("run_end", "resume")
        if not cut and not any(close.seq < event.seq for close in closes):
            rule = f"a {event.kind} comes before its group closed"
            yield _finding("I3", rule, event, f"group {event.group}")
    ended = {history.life(event.seq) for event in history.events["run_end"]}
    for (life, group), (close, *more) in history.closes.items():
        attempts = history.groups.get((life, group), [])
        reason = close.payload.get("reason")
        if more:
            yield _finding("I3", "a group closes twice", more[0], f"group {group}")
        if reason not in CLOSE_REASONS:
            detail = f"group {group}: {reason!r}"
            yield _finding("I3", "a group closes without a reason", close, detail)
        if reason in ("failed", "zero_variance") and life in ended:
            kept = [a for a in attempts if a.ok and not (a.late or a.claims or a.drops)]
            if kept:
                rule = f"a group closed as {reason} is never dropped"
                yield _finding("I3", rule, close, f"group {group}")
        yield from _members_are_explained(history, close, attempts)


def _members_are_explained(
    history: History, close: Event, attempts: list[Attempt]
) -> Iterator[Finding]:
    def finding(rule: str, detail: str) -> Finding:
        return _finding("I3", rule, close, f"group {close.group}: {detail}")

    survivors = set(close.payload["survivors"])
    present = [a for a in attempts if a.ok and a.finish and a.finish.seq < close.seq]
    for episode in sorted(survivors - {attempt.id for attempt in present}):
        yield finding("a survivor had not finished in its group", episode)
    for attempt in present:
        if attempt.id not in survivors and not attempt.drops:
            yield finding("a finished member is not among the survivors", attempt.id)
    counts = Counter(attempt.member for attempt in present if attempt.id in survivors)
    for member, count in counts.items():
        if count > 1:
            yield finding("a member survives more than once", f"member {member}")
    size = history.rules_at(close.seq).samples_per_group
    if close.payload.get("reason") == "complete" and len(counts) != size:
        yield finding("a complete group lacks members", f"{len(counts)} of {size}")


def failures_do_not_train(history: History) -> Iterator[Finding]:
    """I7: failed and withdrawn attempts have no reward and are never consumed."""
    for event in history.events["finish"]:
        reward = event.payload.get("reward")
        if not succeeded(event) and reward is not None:
            detail = f"{event.episode}: {reward}"
            yield _finding("I7", "a failed attempt has a reward", event, detail)
        if event.payload["status"] == "failed" and not event.payload.get("failure"):
            yield _finding("I7", "a failed attempt has no cause", event, event.episode)
    for event in [*history.events["claim"], *history.steps.values()]:
        for episode in event.payload["episodes"]:
            attempt = history.attempts.get(episode)
            if attempt is None or attempt.finish is None:
                continue
            reward = attempt.finish.payload.get("reward")
            if not attempt.ok:
                rule = "a failed attempt is consumed"
            elif reward is None or not math.isfinite(reward):
                rule = "an attempt without a reward is consumed"
            elif not attempt.for_training:
                rule = "a held-out attempt is consumed"
            else:
                continue
            yield _finding("I7", rule, event, episode)


def _finding(invariant: str, rule: str, event: Event, detail: str) -> Finding:
    return Finding(invariant=invariant, rule=rule, row=event.seq, detail=detail)
