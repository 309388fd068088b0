import copy
import math
import random
import sqlite3
from array import array
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from support.recorded import Story, Twist, record
from trueup.errors import RunDirectoryError
from trueup.records.audit import audit
from trueup.records.ledger import Ledger
from trueup.records.schema import KINDS
from trueup.records.tokens import read_step, read_steps
from trueup.scheduling import Rules, rules_as_dict

RULES = Rules(
    groups_per_step=2, samples_per_group=3, slots=(4, 3), staleness=1, consume="wait", retries=1
)


def story(twist=None, table=None, **changes):
    rules = {name: changes.pop(name) for name in list(changes) if name in Rules.__slots__}
    twist = Twist(row=twist, table=table)
    return Story(rules=replace(RULES, **rules), twist=twist, **changes)


def alter(directory, statement, *values):
    db = sqlite3.connect(directory.ledger)
    with db:
        changed = db.execute(statement, values).rowcount
    db.close()
    assert changed


def events(directory, *kinds):
    book = Ledger.open(directory.ledger, readonly=True)
    found = list(book.events(kinds or KINDS))
    book.close()
    return found


class On:
    """Plant one fault: change a row of a kind (the `nth` that `when` accepts)."""

    def __init__(self, kind, change, *, nth=2, when=lambda columns: True):
        self.kind, self.change, self.nth, self.when = kind, change, nth, when
        self.seen, self.happened = 0, False

    def __call__(self, kind, columns):
        if kind != self.kind or not self.when(columns) or self.happened:
            return [columns]
        self.seen += 1
        if self.seen <= self.nth:
            return [columns]
        self.happened = True
        return self.change(copy.deepcopy(columns))


def planted(tmp_path, twist=None, table=None, **changes):
    """Invariants that the audit finds broken, with all messages."""
    directory = record(tmp_path, story(twist, table, **changes))
    assert twist is None or twist.happened, "the fault was planted"
    violations = audit(directory)
    assert "chain" not in {violation.invariant for violation in violations}
    return {v.invariant for v in violations}, "\n".join(v.message for v in violations)


def withheld(columns):
    return []


def payload(**changes):
    def change(columns):
        columns["payload"].update(changes)
        return [columns]

    return change


def failed(columns):
    return columns["payload"]["status"] == "failed"


def done(columns):
    return columns["payload"]["status"] == "done"


# ---- honest runs are clean


@pytest.mark.parametrize("consume", ["accept", "drop", "requeue", "mask", "wait"])
@pytest.mark.parametrize(
    "what",
    [
        {},
        {"fail": 0.2, "refill_zero_variance": True},
        {"timeout": 12.0, "tail": 1.5},
        {"segments": 3, "fail": 0.1, "delay": 1},
        {"kill_after": (130, 90), "fail": 0.1, "sync_every": 2},
        {"skipped": (1, 3), "kill_after": (130,), "steps": 6},
    ],
    ids=["plain", "failures", "timeouts", "segments", "killed twice", "skipped steps"],
)
def test_an_honest_run_is_clean_under_every_policy(tmp_path, consume, what):
    assert audit(record(tmp_path, story(consume=consume, **what))) == []


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 10**6),
    consume=st.sampled_from(["accept", "drop", "requeue", "mask", "wait"]),
    staleness=st.integers(0, 3),
    delay=st.integers(0, 2),
    fail=st.sampled_from([0.0, 0.1, 0.4]),
    timeout=st.sampled_from([8.0, 20.0, 1e9]),
    kills=st.lists(st.integers(1, 200), max_size=2),
)
def test_no_honest_history_is_accused(
    tmp_path_factory, seed, consume, staleness, delay, fail, timeout, kills
):
    made = story(
        consume=consume,
        staleness=staleness,
        delay=delay,
        seed=seed,
        fail=fail,
        timeout=timeout,
        kill_after=tuple(kills),
        steps=4,
    )
    assert audit(record(tmp_path_factory.mktemp("run"), made)) == []


def test_a_run_killed_at_any_row_is_clean_up_to_its_last_row(tmp_path):
    whole = record(tmp_path / "whole", story(fail=0.2, steps=3))
    book = Ledger.open(whole.ledger)
    rows = list(book.rows())
    book.close()
    for last in range(len(rows) - 1, 0, -7):
        alter(whole, "DELETE FROM events WHERE seq > ?", last)
        alter(whole, "UPDATE head SET seq = ?, chain = ?", last, rows[last - 1][-1])
        assert audit(whole) == []


def test_the_audit_reads_a_run_that_is_being_written(tmp_path):
    directory = record(tmp_path, story())
    book = Ledger.open(directory.ledger)
    book.append("tick", actor="controller", payload={"events": [], "actions": []})
    assert audit(directory.path) == []
    book.close()


def test_what_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(RunDirectoryError):
        audit(tmp_path)


# ---- planted faults, each found by its invariant


def test_an_episode_trained_in_two_steps_is_found(tmp_path):
    first = []

    def again(kind, columns):
        if kind == "commit":
            first.extend(columns["payload"]["episodes"][:1])
            if columns["payload"]["step"] == 3:
                columns["payload"]["episodes"] = [*columns["payload"]["episodes"], first[0]]
        return [columns]

    again.happened = True
    found, message = planted(tmp_path, again)
    assert {"I1", "I2", "table"} <= found
    assert f"an episode is trained twice: {first[0]} in steps 0 and 3" in message


def test_an_episode_trained_again_after_its_step_was_undone_is_no_offence(tmp_path):
    directory = record(tmp_path, story(kill_after=(130,)))
    commits = [e.payload["step"] for e in events(directory, "commit")]
    assert len(commits) > len(set(commits)), "a step was trained again"
    assert audit(directory) == []


def test_an_episode_claimed_twice_is_found(tmp_path):
    found, message = planted(tmp_path, On("claim", lambda columns: [columns, columns]))
    assert found == {"I2"}
    assert "claimed twice" in message


def test_a_trained_episode_that_was_never_claimed_is_found(tmp_path):
    found, message = planted(tmp_path, On("claim", withheld))
    assert "I1" in found
    assert "trained without having been claimed" in message


def test_an_episode_that_vanishes_from_its_groups_claim_is_found(tmp_path):
    lost = []

    def lose(kind, columns):
        names = columns.get("payload", {}).get("episodes", [])
        if kind == "claim" and columns["payload"]["step"] == 2 and not lost:
            lost.append(names[0])
        if kind in ("claim", "commit"):
            columns["payload"]["episodes"] = [name for name in names if name not in lost]
        return [columns]

    lose.happened = True

    def table(step, rows):
        return [row for row in rows if row.episode.id not in lost]

    found, message = planted(tmp_path, lose, table)
    assert "I1" in found
    assert f"neither in its group's claim nor dropped: {lost[0]}" in message


def test_a_claimed_episode_that_is_not_trained_needs_a_row_that_says_why(tmp_path):
    def left_out(columns):
        columns["payload"]["episodes"] = columns["payload"]["episodes"][1:]
        return [columns]

    def with_reason(step, rows):
        return [replace(rows[0], reason="rejected"), *rows[1:]] if step == 2 else rows

    def without_row(step, rows):
        return rows[1:] if step == 2 else rows

    assert planted(tmp_path / "a", On("commit", left_out), with_reason)[0] == set()
    assert planted(tmp_path / "b", On("commit", left_out), without_row)[0] == {"I1"}


def test_an_attempt_that_finishes_twice_or_was_never_issued_is_found(tmp_path):
    twice, message = planted(tmp_path / "a", On("finish", lambda columns: [columns, columns]))
    assert twice == {"I1"}
    assert "finishes twice" in message
    unissued, message = planted(tmp_path / "b", On("issue", withheld))
    assert "I1" in unissued
    assert "a finish has no issue before it" in message


def test_a_drop_without_a_reason_is_found(tmp_path):
    nameless = On("drop", payload(reason=""), nth=0)
    found, message = planted(tmp_path, nameless, consume="drop", tail=2.0, steps=8, slots=(3,))
    assert found == {"I1"}
    assert "a drop has no reason" in message


def test_an_attempt_used_beyond_the_resume_that_ended_it_is_found(tmp_path):
    directory = record(tmp_path, story(kill_after=(130,)))
    book = Ledger.open(directory.ledger)
    (resume,) = book.events(["resume"])
    stale = next(
        e for e in book.events(["finish"]) if e.seq < resume.seq and e.payload["status"] == "done"
    )
    body = {"step": 5, "episodes": [stale.episode]}
    book.append("claim", actor="controller", group=stale.group, version=5, payload=body)
    book.close()
    assert any("that a resume had ended" in v.message for v in audit(directory))


@pytest.mark.parametrize("reason", [None, "", "because"])
def test_a_group_closed_without_a_reason_is_found(tmp_path, reason):
    found, message = planted(tmp_path, On("close", payload(reason=reason)))
    assert found == {"I3"}
    assert f"closes without a reason: group 2: {reason!r}" in message


def test_a_group_that_is_claimed_without_having_closed_is_found(tmp_path):
    found, message = planted(tmp_path, On("close", withheld))
    assert found == {"I3"}
    assert "a claim comes before its group closed" in message


def test_a_group_that_shrank_in_silence_is_found(tmp_path):
    def shrink(columns):
        columns["payload"]["survivors"] = columns["payload"]["survivors"][1:]
        return [columns]

    found, message = planted(tmp_path, On("close", shrink))
    assert found == {"I3"}
    assert "a complete group lacks members: group 2: 2 of 3" in message
    assert "a finished member is not among the survivors" in message


def test_a_failed_attempt_with_a_reward_is_found(tmp_path):
    found, message = planted(
        tmp_path, On("finish", payload(reward=0.0), nth=0, when=failed), fail=0.3
    )
    assert found == {"I7"}
    assert "a failed attempt has a reward" in message


def test_a_failed_attempt_that_trains_is_found(tmp_path):
    failures = []

    def consume(kind, columns):
        if kind == "finish" and failed(columns):
            failures.append(columns["episode"])
        if kind == "commit" and failures:
            columns["payload"]["episodes"] = [*columns["payload"]["episodes"], failures[0]]
        return [columns]

    consume.happened = True
    found, message = planted(tmp_path, consume, fail=0.3)
    assert "I7" in found
    assert f"a failed attempt is consumed: {failures[0]}" in message


@pytest.mark.parametrize("what", [{"reward": None}, {"status": "aborted"}])
def test_an_attempt_without_a_verdict_that_trains_is_found(tmp_path, what):
    found, _ = planted(tmp_path, On("finish", payload(**what), when=done))
    assert "I7" in found


def test_a_span_of_a_version_that_was_never_applied_is_found(tmp_path):
    def forge(columns):
        columns["payload"]["spans"][0][0] += 1
        return [columns]

    when = lambda c: done(c) and c["payload"]["spans"][-1][0] == 0  # noqa: E731
    found, message = planted(tmp_path, On("finish", forge, nth=0, when=when))
    assert {"I4", "table"} <= found
    assert "had not applied" in message
    assert "provenance differs" in message


@pytest.mark.parametrize(("field", "value"), [(1, "engine-9"), (2, 7)])
def test_a_span_of_an_unknown_engine_or_epoch_is_found(tmp_path, field, value):
    def forge(columns):
        columns["payload"]["spans"][0][field] = value
        return [columns]

    found, message = planted(tmp_path, On("finish", forge, when=done))
    assert found == {"I4", "table"}
    assert "had not applied" in message


def test_an_applied_digest_that_was_not_published_is_found(tmp_path):
    found, message = planted(tmp_path, On("apply", payload(digest="torn")))
    assert found == {"I4"}
    assert "applied another digest" in message
    assert "torn, published life 0 version 1" in message


def test_a_version_applied_but_never_published_is_found(tmp_path):
    found, message = planted(tmp_path, On("publish", withheld))
    assert found == {"I4"}
    assert "published nothing" in message


def test_tokens_sampled_before_their_version_was_applied_are_found(tmp_path):
    found, _ = planted(tmp_path, On("apply", withheld))
    assert found == {"I4"}


def test_a_consumed_token_beyond_the_bound_is_found(tmp_path):
    # The run accepts stale tokens; the ledger claims that it waits for fresh ones.
    pretend = On("run_start", lambda c: pretended(c, consume="wait"), nth=0)
    found, message = planted(tmp_path, pretend, consume="accept", tail=2.0, steps=8, slots=(3,))
    assert found == {"I5"}
    assert "a token beyond the bound of 1 is consumed" in message


def pretended(columns, **rules):
    columns["payload"]["schedule"].update(rules)
    return [columns]


def test_a_token_beyond_the_bound_that_is_not_masked_is_found(tmp_path):
    def unmask(step, rows):
        return [replace(row, keep=None) for row in rows]

    found, message = planted(tmp_path, None, unmask, consume="mask", tail=2.0, steps=8, slots=(3,))
    assert found == {"I5"}
    assert "not masked" in message


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_kept_token_without_a_finite_log_prob_is_found(tmp_path, bad):
    def spoil(keep):
        def table(step, rows):
            (segment,) = rows[0].episode.segments
            n = len(segment.logp_behaviour)
            logps = array("f", [bad, *segment.logp_behaviour[1:]])
            episode = replace(rows[0].episode, segments=(replace(segment, logp_behaviour=logps),))
            return [replace(rows[0], episode=episode, keep=[keep] + [True] * (n - 1)), *rows[1:]]

        return table

    assert planted(tmp_path / "a", None, spoil(True))[0] == {"I8"}
    assert planted(tmp_path / "b", None, spoil(False))[0] == set()


def test_a_missing_commit_is_found(tmp_path):
    found, message = planted(tmp_path, On("commit", withheld))
    assert {"versions", "staleness"} <= found
    assert "version 4 after 2" in message


@pytest.mark.parametrize("change", [{"step": 3}, {"step": 1}])
def test_a_commit_of_another_step_than_its_version_is_found(tmp_path, change):
    found, message = planted(tmp_path, On("commit", payload(**change)))
    assert "versions" in found
    assert "a commit is of another step than is due" in message


def test_a_resume_from_a_step_that_was_never_committed_is_found(tmp_path):
    def ahead(columns):
        columns["payload"]["step"] += 3
        columns["version"] += 3
        return [columns]

    found, message = planted(tmp_path, On("resume", ahead, nth=0), kill_after=(130,))
    assert "versions" in found
    assert "a resume goes on from what was not committed" in message


def test_a_resume_from_a_step_that_another_resume_had_undone_is_found(tmp_path):
    directory = record(tmp_path, story(kill_after=(150,)))
    book = Ledger.open(directory.ledger)
    for step in (2, 4):
        body = {"step": step, "schedule": rules_as_dict(RULES)}
        book.append("resume", actor="controller", version=step, payload=body)
    book.close()
    (violation,) = audit(directory)
    assert violation.message.startswith("a resume goes on from what was not committed: step 4, ")


def test_a_resumed_run_is_held_to_the_rules_it_was_resumed_with(tmp_path):
    calm = story(consume="accept", tail=2.0, steps=8, slots=(3,), kill_after=(1,))
    pretend = On("run_start", lambda c: pretended(c, consume="wait"), nth=0)
    calm.twist.row = pretend  # only the first life, which ends with its first row
    assert audit(record(tmp_path, calm)) == []
    assert pretend.happened


@pytest.mark.parametrize("kind", ["issue", "claim"])
def test_a_forged_version_column_breaks_the_conservation_of_staleness(tmp_path, kind):
    def forge(columns):
        columns["version"] += 1
        return [columns]

    found, message = planted(tmp_path, On(kind, forge))
    assert {"versions", "staleness"} <= found
    assert "recorded ages differ from counted version bumps" in message


def test_more_staleness_than_admission_allows_is_found(tmp_path):
    pretend = On("run_start", lambda c: pretended(c, staleness=0), nth=0)
    found, message = planted(tmp_path, pretend, consume="accept", staleness=2)
    assert found == {"staleness"}
    assert "above what admission allows" in message


# ---- one change, one rule


def column(**changes):
    def change(columns):
        return [{**columns, **{name: columns[name] + by for name, by in changes.items()}}]

    return change


def with_ghost(columns):
    columns["payload"]["survivors"].append("ghost")
    return [columns]


def twice(columns):
    return [columns, columns]


def dropped_for(reason):
    return lambda columns: columns["payload"]["reason"] == reason


STALE = {"consume": "drop", "tail": 2.0, "steps": 8, "slots": (3,)}


@pytest.mark.parametrize(
    ("twist", "options", "invariant", "rule"),
    [
        (On("issue", twice), {}, "I1", "an episode id is issued more than once"),
        (On("finish", column(group=1)), {}, "I1", "a finish is of another attempt or group"),
        (On("finish", column(attempt=1)), {}, "I1", "a finish is of another attempt or group"),
        (On("claim", column(group=1)), {}, "I1", "a claim names an attempt of another group"),
        (On("drop", twice, nth=0), STALE, "I1", "dropped and claimed, or dropped twice"),
        (On("issue", withheld), {}, "I1", "a claim names an attempt that was not issued"),
        (On("finish", withheld), {}, "I1", "a claim names an attempt that had not finished"),
        (On("close", twice), {}, "I3", "a group closes twice"),
        (On("close", with_ghost), {}, "I3", "a survivor had not finished in its group"),
        (On("issue", payload(member=0), nth=1), {}, "I3", "a member survives more than once"),
        (
            On("drop", withheld, nth=0, when=dropped_for("zero_variance")),
            {"refill_zero_variance": True},
            "I3",
            "a group closed as zero_variance is never dropped",
        ),
        (On("finish", payload(action_tokens=999)), {}, "I4", "spans do not add up"),
        (On("claim", column(version=-9)), {}, "I5", "that the trainer had not produced"),
        (On("issue", payload(split="heldout")), {}, "I7", "a held-out attempt is consumed"),
        (
            On("finish", payload(failure=None), nth=0, when=failed),
            {"fail": 0.3},
            "I7",
            "a failed attempt has no cause",
        ),
        (On("claim", payload(step=9)), {}, "versions", "a claim is of another step than is due"),
        (
            On("resume", column(version=1), nth=0),
            {"kill_after": (130,)},
            "versions",
            "a resume goes on from what was not committed",
        ),
        (
            On("skip", column(version=1), nth=0),
            {"skipped": (1,)},
            "versions",
            "a skip does not add 0",
        ),
        (On("commit", column(version=1)), {}, "versions", "a commit does not add 1 to the version"),
        (On("drop", column(version=-999), nth=0), STALE, "staleness", "recorded ages differ"),
        (On("claim", column(version=999)), {}, "staleness", "older than all there were"),
        (On("finish", payload(spans=[[0, "e"]])), {}, "schema", "spans must be a list of"),
        (On("issue", payload(member="0")), {}, "schema", "member must be an integer"),
        (On("finish", payload(reward="1")), {}, "schema", "reward must be a number or null"),
        (On("run_start", withheld, nth=0), {}, "schema", "does not begin with run_start"),
        (On("run_start", payload(schedule={}), nth=0), {}, "schema", "Scheduler's parameters"),
    ],
)
def test_a_broken_rule_is_named(tmp_path, twist, options, invariant, rule):
    found, message = planted(tmp_path, copy.copy(twist), **options)
    assert invariant in found
    assert rule in message


# ---- the table


def forge_span(step, rows):
    (segment,) = rows[0].episode.segments
    first = replace(segment.spans[0], version=segment.spans[0].version + 1)
    segment = replace(segment, spans=(first, *segment.spans[1:]))
    return [replace(rows[0], episode=replace(rows[0].episode, segments=(segment,))), *rows[1:]]


def drop_token(step, rows):
    (segment,) = rows[0].episode.segments
    action = array("b", segment.action)
    n = len(segment.logp_behaviour)
    action[-1] = 0
    *before, last = segment.spans
    spans = (*before, replace(last, stop=last.stop - 1))
    logps = segment.logp_behaviour[: n - 1]
    segment = replace(segment, action=action, logp_behaviour=logps, spans=spans)
    episode = replace(rows[0].episode, segments=(segment,))
    return [replace(rows[0], episode=episode, keep=None), *rows[1:]]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (lambda step, rows: rows[1:], "a trained episode has no row"),
        (lambda step, rows: [rows[0], *rows], "a segment is in the table twice"),
        (
            lambda step, rows: [replace(rows[0], reason="rejected"), *rows[1:]],
            "a trained episode has a reason for leaving it out: step 2, ",
        ),
        (forge_span, "the table's provenance differs from the ledger's"),
        (drop_token, "the table's number of action tokens differs"),
        (
            lambda step, rows: [
                replace(rows[0], episode=replace(rows[0].episode, reward=9.0)),
                *rows[1:],
            ],
            "reward differs",
        ),
        (
            lambda step, rows: [
                *rows,
                replace(rows[0], episode=replace(rows[0].episode, id="stranger")),
            ],
            "a row without a reason was not trained",
        ),
    ],
)
def test_a_table_that_disagrees_with_the_ledger_is_found(tmp_path, table, message):
    found, text = planted(tmp_path, None, lambda s, rows: table(s, rows) if s == 2 else rows)
    assert found == {"table"}
    assert message in text
    assert "step 2, " in text


def test_a_segment_that_is_missing_from_an_episode_is_found(tmp_path):
    def lose(step, rows):
        first = rows[0].episode
        return [
            replace(rows[0], episode=replace(first, segments=first.segments[1:]), keep=None),
            *rows[1:],
        ]

    found, _ = planted(tmp_path, None, lose, segments=2)
    assert found == {"table"}


@pytest.mark.parametrize("damage", ["missing", "truncated", "foreign"])
def test_a_damaged_table_is_found(tmp_path, damage):
    directory = record(tmp_path, story())
    path = directory.episode_file(1)
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        path.write_bytes(b"not parquet")
    (violation,) = audit(directory)
    assert violation.invariant == "table"
    assert "step 1" in violation.message


def test_a_log_prob_that_is_missing_from_a_row_is_found(tmp_path):
    directory = record(tmp_path, story())
    table = read_step(directory, 1)
    index = table.column_names.index("logp_behaviour")
    first, *rest = table["logp_behaviour"].to_pylist()
    shorter = pa.array([first[1:], *rest], table.schema.field(index).type)
    parquet.write_table(
        table.set_column(index, "logp_behaviour", shorter), directory.episode_file(1)
    )
    (violation,) = audit(directory)
    assert violation.invariant == "I8"
    assert "log-probs and action tokens differ in number" in violation.message


def test_a_gap_in_the_numbers_of_segments_is_found(tmp_path):
    directory = record(tmp_path, story())
    table = read_step(directory, 1)
    index = table.column_names.index("segment")
    later = pa.array([1] + [0] * (table.num_rows - 1), pa.int32())
    parquet.write_table(table.set_column(index, "segment", later), directory.episode_file(1))
    (violation,) = audit(directory)
    assert "the table's segments differs from the ledger's: step 1, " in violation.message


def test_dropped_and_failed_episodes_are_rows_with_their_reason(tmp_path):
    directory = record(tmp_path, story(fail=0.3))
    table = read_steps(directory, ["episode", "reason", "segment"]).to_pylist()
    failures = [row for row in table if row["reason"] == "failed"]
    assert failures
    assert all(row["segment"] == -1 for row in failures)


# ---- the chain


def test_a_deleted_row_is_found(tmp_path):
    directory = record(tmp_path, story())
    alter(directory, "DELETE FROM events WHERE seq = 40")
    found = {violation.invariant: violation for violation in audit(directory)}
    assert "row 40 is missing" in found["chain"].message
    assert 41 in found["chain"].rows


def test_an_altered_payload_is_found(tmp_path):
    directory = record(tmp_path, story())
    (finish, *_) = [e for e in events(directory, "finish") if e.payload["reward"] == 0.0]
    alter(
        directory,
        "UPDATE events SET payload = json_replace(payload, '$.reward', 1.0) WHERE seq = ?",
        finish.seq,
    )
    broken = next(v for v in audit(directory) if v.invariant == "chain")
    assert broken.rows == (finish.seq,)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    pick=st.integers(0, 10**6),
    column=st.sampled_from(
        [
            "actor",
            "actor_seq",
            "t_mono",
            "t_wall",
            "kind",
            "episode",
            "attempt",
            "grp",
            "version",
            "engine",
            "payload",
        ]
    ),
    value=st.one_of(
        st.integers(-(2**40), 2**40), st.text(max_size=5), st.sampled_from(["issue", "{}", "[]"])
    ),
)
def test_the_audit_finds_any_altered_column_and_survives_what_it_reads(
    tmp_path, pick, column, value
):
    if not (tmp_path / "run").exists():
        record(tmp_path, story(steps=2))
    db = sqlite3.connect(tmp_path / "run" / "run.db", isolation_level=None)
    try:
        (count,) = db.execute("SELECT MAX(seq) FROM events").fetchone()
        seq = 1 + pick % count
        query = f"SELECT {column} FROM events WHERE seq = ?"
        (before,) = db.execute(query, (seq,)).fetchone()
        db.execute(f"UPDATE events SET {column} = ? WHERE seq = ?", (value, seq))
        (after,) = db.execute(query, (seq,)).fetchone()
        found = audit(tmp_path / "run")
        db.execute(f"UPDATE events SET {column} = ? WHERE seq = ?", (before, seq))
    finally:
        db.close()
    same = after == before and type(after) is type(before)
    assert any(v.invariant == "chain" for v in found) is not same
    assert audit(tmp_path / "run") == []


def test_messages_name_the_first_offenders_and_count_the_rest(tmp_path):
    directory = record(tmp_path, story())
    rows = [event.seq for event in events(directory)]
    chosen = sorted(random.Random(0).sample(rows[1:-1], 5))
    for seq in chosen:
        alter(directory, "UPDATE events SET t_wall = t_wall + 1 WHERE seq = ?", seq)
    (violation,) = audit(directory)
    assert violation.rows == tuple(chosen)
    assert violation.message.startswith(f"the hash chain is broken: row {chosen[0]} does not hash")
    assert violation.message.endswith("; and 2 more")
