"""A virtual-time driver of `Scheduler` for tests: durations in, history out."""

from __future__ import annotations

from dataclasses import dataclass, field

from trueup.scheduling import (
    AbortEpisode,
    CloseGroup,
    DropGroup,
    EpisodeFinished,
    Rules,
    Scheduler,
    StartEpisode,
    StartGroup,
    StartSync,
    StartTraining,
    SyncFinished,
    TrainingFinished,
    decode,
    encode,
)


@dataclass
class History:
    events: list = field(default_factory=list)
    """('gen', slot, start, end, version) · ('train', 0, start, end, version) · ('sync', ...)."""
    time: float = 0.0
    trained: list = field(default_factory=list)
    """(lag of the group's oldest start, duration) per trained episode."""
    groups: list = field(default_factory=list)
    """Trained group ids in order."""
    dropped: list = field(default_factory=list)
    closed: dict = field(default_factory=dict)
    reissued: list = field(default_factory=list)
    ticks: list = field(default_factory=list)
    """(encoded events, encoded actions): replayed by tests."""
    removed_age: int = 0
    left_age: int = 0
    exposure: int = 0
    """Sum over version bumps of episodes in flight or buffered."""


def run(rules, durations, train_time, sync_time, steps, *, outcome=None):
    """Drive a Scheduler; `outcome(group, member, attempt) -> (ok, reward)` decides failures."""
    outcome = outcome or (lambda group, member, attempt: (True, float(member % 2)))
    scheduler, history, supply = Scheduler(rules), History(), iter(durations)
    now = 0.0
    starts: dict[tuple[int, int, int], list] = {}
    timers: dict[str, tuple[float, object]] = {}
    members: dict[int, list[tuple[int, float]]] = {}
    in_pipe: dict[int, list[int]] = {}
    engine_version = [rules.first_version] * len(rules.slots)
    version = rules.first_version

    def act(events):
        actions = scheduler.advance(*events)
        history.ticks.append((encode(events), encode(actions)))
        assert decode(encode(actions)) == actions
        for action in actions:
            match action:
                case StartGroup():
                    members[action.group] = []
                    in_pipe[action.group] = []
                    if action.reissue_of >= 0:
                        history.reissued.append(action.reissue_of)
                case StartEpisode(group, member, attempt, engine, slot):
                    key, duration = (group, member, attempt), next(supply)
                    serves = engine_version[engine]
                    starts[key] = [now, now + duration, slot, serves, duration, version, engine]
                    in_pipe[group].append(version)
                case AbortEpisode(group, member, attempt):
                    starts[group, member, attempt][1] = now
                case StartTraining(at, groups):
                    assert at == version
                    history.groups += groups
                    for group in groups:
                        history.trained += [(version - v, d) for v, d in members[group]]
                        history.removed_age += sum(version - v for v in in_pipe.pop(group))
                    timers["train"] = (now + train_time, TrainingFinished(version + 1))
                    history.events.append(("train", 0, now, now + train_time, version))
                case StartSync(engine, target):
                    timers[f"sync{engine}"] = (now + sync_time, SyncFinished(engine, target))
                    history.events.append(("sync", engine, now, now + sync_time, version - 1))
                    for item in starts.values():
                        if item[6] == engine:
                            item[1] += sync_time
                case CloseGroup(group, reason, kept):
                    history.closed[group] = (reason, kept)
                case DropGroup(group, reason):
                    history.dropped.append((group, reason))
                    history.removed_age += sum(version - v for v in in_pipe.pop(group))

    act([])
    lag = rules.delay + rules.sync_every - 1
    while version < steps or (lag == 0 and min(engine_version) < version):
        now = min([item[1] for item in starts.values()] + [t for t, _ in timers.values()])
        events = [event for t, event in timers.values() if t == now]
        # the seed's order within an instant: sync, train, episodes in order of their start
        events.sort(key=lambda event: not isinstance(event, SyncFinished))
        timers = {name: item for name, item in timers.items() if item[0] != now}
        for event in events:
            if isinstance(event, SyncFinished):
                engine_version[event.engine] = event.version
            if isinstance(event, TrainingFinished):
                version = event.version
                history.exposure += sum(map(len, in_pipe.values()))
        for key, (start, end, slot, serves, duration, _, _) in list(starts.items()):
            if end != now:
                continue
            del starts[key]
            ok, reward = outcome(*key)
            history.events.append(("gen", slot, start, end, serves))
            if ok and key[0] not in history.closed:
                members[key[0]].append((serves, duration))
            events.append(EpisodeFinished(*key, ok, serves, reward))
        act(events)
    history.time = now
    history.left_age = sum(version - v for ages in in_pipe.values() for v in ages)
    return history


def replay(rules, history):
    """Actions of a fresh Scheduler for the recorded events."""
    scheduler = Scheduler(rules)
    return [encode(scheduler.advance(*decode(events))) for events, _ in history.ticks]


__all__ = ["History", "Rules", "replay", "run"]
