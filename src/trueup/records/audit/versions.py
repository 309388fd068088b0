"""What must hold of versions: labels true, bound kept, one more per step, staleness conserved.

Each check is pure and yields `Finding`s; none needs another to have passed.
"""

from __future__ import annotations

from collections.abc import Iterator

from trueup.records.audit.finding import Finding
from trueup.records.audit.history import Attempt, History, spans_of
from trueup.records.schema import Event


def provenance_is_true(history: History) -> Iterator[Finding]:
    """I4: an engine applied what was published, before it sampled with it."""
    published: dict[int, str] = {}
    applied: set[tuple[int, str, int]] = set()
    kinds = ("publish", "apply", "probe", "resume", "finish")
    rows = [event for kind in kinds for event in history.events[kind]]
    for event in sorted(rows, key=lambda event: event.seq):
        payload = event.payload
        if event.kind == "publish":
            published[event.version] = payload["digest"]
        elif event.kind == "resume":
            # The processes died, and versions beyond the checkpoint are produced anew.
            published = {v: digest for v, digest in published.items() if v <= event.version}
            applied.clear()
        elif event.kind == "apply":
            applied.add((event.version, event.engine, payload["epoch"]))
            expected = published.get(event.version)
            if payload["digest"] != expected:
                yield Finding(
                    invariant="I4",
                    rule="an engine applied another digest than was published",
                    row=event.seq,
                    detail=f"{event.engine} version {event.version}: "
                    f"{payload['digest']}, published {expected or 'nothing'}",
                )
        elif event.kind == "probe":
            if (event.version, event.engine, payload["epoch"]) not in applied:
                yield Finding(
                    invariant="I4",
                    rule="a probe is of a version that its engine had not applied",
                    row=event.seq,
                    detail=f"version {event.version} on {event.engine} epoch {payload['epoch']}",
                )
        else:
            yield from _spans_are_true(event, applied)


def _spans_are_true(finish: Event, applied: set[tuple[int, str, int]]) -> Iterator[Finding]:
    spans = spans_of(finish)
    if sum(tokens for _, tokens in spans) != finish.payload["action_tokens"] or any(
        tokens < 0 for _, tokens in spans
    ):
        yield Finding(
            invariant="I4",
            rule="spans do not add up to the action tokens",
            row=finish.seq,
            detail=finish.episode,
        )
    for version, engine, epoch in {key for key, _ in spans} - applied:
        yield Finding(
            invariant="I4",
            rule="a span names a version that its engine had not applied",
            row=finish.seq,
            detail=f"{finish.episode}: version {version} on {engine} epoch {epoch}",
        )


def the_bound_holds(history: History) -> Iterator[Finding]:
    """I5: no consumed token is older than the bound, or younger than its trainer."""
    for attempt in history.attempts.values():
        if attempt.finish is None:
            continue
        for claim in attempt.claims:
            rules = history.rules_at(claim.seq)
            lags = [claim.version - key[0] for key, _ in spans_of(attempt.finish)]
            oldest, youngest = max(lags, default=0), min(lags, default=0)
            if youngest < 0:
                yield Finding(
                    invariant="I5",
                    rule="a token is of a version that the trainer had not produced",
                    row=claim.seq,
                    detail=f"{attempt.id}: {-youngest} ahead",
                )
            if rules.consume in ("wait", "drop", "requeue") and oldest > rules.bound:
                yield Finding(
                    invariant="I5",
                    rule=f"a token beyond the bound of {rules.bound} is consumed",
                    row=claim.seq,
                    detail=f"{attempt.id}: lag {oldest}",
                )


def versions_grow_by_one(history: History) -> Iterator[Finding]:
    """Versions: a commit adds one, a skip none, steps follow each other, rows carry the current."""

    def finding(rule: str, event: Event, detail: str) -> Finding:
        return Finding(invariant="versions", rule=rule, row=event.seq, detail=detail)

    for kind, bump in (("commit", 1), ("skip", 0)):
        for event in history.events[kind]:
            before = history.version_at(event.seq)
            if event.version != before + bump:
                detail = f"version {event.version} after {before}"
                yield finding(f"a {kind} does not add {bump} to the version", event, detail)
    for kind in ("claim", "commit", "skip"):
        for event in history.events[kind]:
            step, due = event.payload["step"], history.step_at(event.seq)
            if step != due:
                rule = f"a {kind} is of another step than is due"
                yield finding(rule, event, f"step {step}, due {due}")
    for event in history.unfounded:
        detail = f"step {event.payload['step']}, version {event.version}"
        yield finding("a resume goes on from what was not committed", event, detail)
    for kind in ("issue", "claim", "drop"):
        for event in history.events[kind]:
            current = history.version_at(event.seq)
            if event.version != current and event.payload.get("reason") != "resume":
                detail = f"{kind} says {event.version}, was {current}"
                yield finding("a row's version is not the trainer's", event, detail)


def staleness_is_conserved(history: History) -> Iterator[Finding]:
    """The laws of staleness, from the recorded versions on one side and counted bumps on the other.

    Σ start staleness of the trained + age at removal of the dropped and failed + age of the left
    over = Σ over version bumps of (in flight + buffered); the trained alone are at most that; and
    where nothing was refunded, K steps have a mean of at most η(K − 1)/K.
    """
    ages = bumps = trained = claimed = 0
    for attempt in history.attempts.values():
        if not attempt.for_training:
            continue
        seq, version = _removal(history, attempt)
        age = version - attempt.issue.version
        ages += age
        bumps += history.bumps_between(attempt.issue.seq, seq)
        if attempt.claims and attempt.claims[0].seq == seq:
            trained += age
            claimed += 1
    if ages != bumps:
        yield _law("recorded ages differ from counted version bumps", f"{ages} and {bumps}")
    if trained > bumps:
        yield _law("the trained are older than all there were", f"{trained} > {bumps}")
    yield from _mean_is_within_admission(history, trained, claimed)


def _mean_is_within_admission(history: History, trained: int, claimed: int) -> Iterator[Finding]:
    claims = history.events["claim"]
    if not claims or history.events["resume"]:
        return
    rules = history.rules_at(claims[0].seq)
    if rules.delay:
        return
    if any(event.seq < claims[-1].seq for event in history.refunds()):
        return
    steps = len({event.payload["step"] for event in claims})
    if trained * steps > rules.staleness * (steps - 1) * claimed:
        limit = rules.staleness * (steps - 1) / steps
        detail = f"{trained / claimed:.3f} over {steps} steps, at most {limit:.3f}"
        yield _law("the mean start staleness is above what admission allows", detail)


def _law(rule: str, detail: str) -> Finding:
    return Finding(invariant="staleness", rule=rule, row=0, detail=detail)


def _removal(history: History, attempt: Attempt) -> tuple[float, int]:
    """When an attempt left the pipeline (seq), and the trainer's version then."""
    end = attempt.ends_at
    ways = [(end, history.version_at(end))]
    ways += [(event.seq, event.version) for event in [*attempt.claims, *attempt.drops]]
    finish = attempt.finish
    if finish and (not attempt.ok or attempt.late):
        ways.append((finish.seq, history.version_at(finish.seq)))
    return min(ways)
