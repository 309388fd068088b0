"""What the ledger holds: the kinds of events and what each carries.

The controller is the only writer. Rows are ordered by `seq`; `t_mono` (machine monotonic clock) and
`t_wall` say when, `chain` is a hash over the row and the row before it. Columns that do not apply
hold -1 or "". `payload` is one JSON object:

kind        columns set                       payload
----------  --------------------------------  ------------------------------------------------------
run_start   -                                 config_digest, schedule (the Scheduler's parameters)
tick        -                                 events, actions: what the Scheduler was told and what
                                              it decided; a replay compares them
issue       episode attempt group version     task, member, slot, split (train | heldout); version =
            engine                            the trainer's when the attempt was started
finish      episode attempt group             status, reward, failure, tokens, action_tokens, turns,
                                              counters, spans [[version, engine, epoch, tokens]...],
                                              t_submit, t_start, t_end
close       group                             reason (complete | partial | timeout | failed |
                                              zero_variance), survivors [episode ids], task, stream
claim       group version                     step, episodes [ids]; version = the trainer's when the
                                              step that consumes the group starts
drop        group version                     reason (stale | failed | zero_variance | timeout |
                                              run_end | resume), episodes [ids]; version = the
                                              trainer's at that moment
train       version                           step, t0, t1, phases {name: seconds}
commit      version                           step, episodes [ids trained]; version = the one
                                              produced
skip        version                           step, episodes of a step that learned nothing: no
                                              version came of it and its groups are refunded
publish     version                           digest, nbytes, n_changed, t0, t1
apply       engine version                    epoch, digest, t_start, t_staged, t_end,
                                              tokens_recomputed, nbytes, prepare_s (of the
                                              staging: quantising, repacking), pause_s
probe       engine version                    epoch, tokens, cached (share of the context), mean,
                                              p99 and max |log π_v − log μ|, floor and limit of the
                                              mean, alarms [[verdict, meaning]...]; version = the
                                              one loaded before
activity    engine                            stretches [[t0, t1, decoded, prefilled, steps]...]
eval        version                           step, heldout_pass_rate, reads_per_episode, episodes,
                                              failed, passed, by_task [[task, passed,
                                              episodes]...]
checkpoint  version                           step, digest, path
resume      version                           step, path, skipped [[path, reason]...], schedule
run_end     version                           reason (done | interrupted | fault), message

Order, on which the audit relies: a step's episode table is written before its commit; a version is
published (version 0 too) before an engine applies it, and applied before it can be in a span; every
claim comes before its step's commit; the rows of a resumed run begin with `resume`, whose version
is the one that training goes on from. Steps count from 0; the `step` of a checkpoint or a resume is
the number of steps done, which is the step to do next. What was in flight or buffered ends with the
`resume`: its tasks are issued again. Episode ids are unique over the whole run, resumes included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KINDS = (
    "run_start",
    "tick",
    "issue",
    "finish",
    "close",
    "claim",
    "drop",
    "train",
    "commit",
    "skip",
    "publish",
    "apply",
    "probe",
    "activity",
    "eval",
    "checkpoint",
    "resume",
    "run_end",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One row of the ledger."""

    seq: int
    """1, 2, ... without gaps."""
    actor: str
    """Who it is about: `controller`, `trainer`, `engine-0`, ..."""
    actor_seq: int
    """1, 2, ... within the actor."""
    t_mono: float
    t_wall: float
    kind: str
    episode: str = ""
    attempt: int = -1
    group: int = -1
    version: int = -1
    engine: str = ""
    payload: dict[str, Any] = field(default_factory=dict)
    chain: str = ""
    """Hex digest over the row before and this row."""
