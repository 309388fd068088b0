"""The rules of admission, consumption and sync as one state machine.

`Scheduler` knows no clock, task, tensor or process: events go in, actions come out. The live
controller drives it with asyncio, a simulator in virtual time, and a run's recorded events replayed
through it give the recorded actions. Synchronous training is the same machine with staleness 0.

Words: a *group* is admitted whole and holds `samples_per_group` members; each member runs as an
episode in a slot of one engine and may take several attempts. `version` is the trainer's; an engine
serves `version − delay` at most, and is behind while it syncs.

Every event costs O(log groups + engines + staleness), independent of the number of slots.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any, Literal

Consume = Literal["accept", "drop", "requeue", "mask", "wait"]
SyncMode = Literal["interrupt", "drain"]
CloseReason = Literal["complete", "partial", "timeout", "failed", "zero_variance"]
DropReason = Literal["stale", "failed", "zero_variance", "timeout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Everything that decides; equal rules and events give equal actions."""

    groups_per_step: int
    samples_per_group: int
    slots: tuple[int, ...]
    """Slots of each engine."""
    staleness: int = 0
    """η: step batches that generation may run ahead."""
    delay: int = 0
    """Versions an engine stays behind."""
    consume: Consume = "accept"
    sync_mode: SyncMode = "interrupt"
    sync_every: int = 1
    """Updates per sync."""
    retries: int = 0
    """Further attempts of a member whose infrastructure failed."""
    min_survivors: int = 1
    """Fewest finished members with which an incomplete group is trained."""
    refill_zero_variance: bool = False
    """A group whose rewards are all equal is refunded instead of consumed."""
    first_version: int = 0
    """Version that trainer and engines start from (a resumed run starts above 0)."""
    first_step: int = 0
    """Step batches consumed before the start; above `first_version` by the skipped ones."""
    first_group: int = 0
    """Id of the first group; ids are unique within a run, also across resumes."""
    steps: int = 0
    """Step batches after which the run is over; 0: never."""

    @property
    def bound(self) -> int:
        """Largest lag of a token that admission intends."""
        return self.staleness + self.delay + self.sync_every - 1


# ---- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EpisodeFinished:
    """An attempt ended; `ok` is False for infrastructure failures and withdrawn attempts."""

    group: int
    member: int
    attempt: int
    ok: bool
    version: int = -1
    """Oldest version among its tokens; -1 if unknown or none."""
    reward: float = 0.0


@dataclass(frozen=True, slots=True)
class GroupTimedOut:
    """A group's deadline passed."""

    group: int


@dataclass(frozen=True, slots=True)
class TrainingFinished:
    """A step is over: the trainer is at the next version, or at the same if it learned nothing.

    A step batch without contrast or without a usable token makes no version; its groups are
    refunded, since they moved nothing.
    """

    version: int


@dataclass(frozen=True, slots=True)
class SyncFinished:
    """An engine serves a version, attested."""

    engine: int
    version: int


Event = EpisodeFinished | GroupTimedOut | TrainingFinished | SyncFinished


# ---- actions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Take a task: the next one, or that of an earlier group issued again."""

    group: int
    reissue_of: int = -1


@dataclass(frozen=True, slots=True)
class StartEpisode:
    """Run one attempt of one member in a slot."""

    group: int
    member: int
    attempt: int
    engine: int
    slot: int


@dataclass(frozen=True, slots=True)
class AbortEpisode:
    """Withdraw a running attempt; it still reports EpisodeFinished(ok=False)."""

    group: int
    member: int
    attempt: int


@dataclass(frozen=True, slots=True)
class CloseGroup:
    """A group will not change any more; `members` are the ones that finished."""

    group: int
    reason: CloseReason
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropGroup:
    """A closed group will never be trained; its place in the budget is free again."""

    group: int
    reason: DropReason


@dataclass(frozen=True, slots=True)
class StartTraining:
    """Train the step that turns `version` into `version + 1`."""

    version: int
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartSync:
    """Load a version into an engine."""

    engine: int
    version: int


Action = (
    StartGroup | StartEpisode | AbortEpisode | CloseGroup | DropGroup | StartTraining | StartSync
)

_BY_NAME: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        *(EpisodeFinished, GroupTimedOut, TrainingFinished, SyncFinished),
        *(StartGroup, StartEpisode, AbortEpisode, CloseGroup, DropGroup, StartTraining, StartSync),
    )
}


def encode(items: Iterable[Event | Action]) -> list[list[Any]]:
    """Events or actions as JSON: `[name, *fields]` each."""
    return [[type(item).__name__, *astuple(item)] for item in items]


def decode(items: Iterable[Sequence[Any]]) -> list[Any]:
    """The inverse of `encode`."""
    return [
        _BY_NAME[name](*(tuple(value) if isinstance(value, list) else value for value in values))
        for name, *values in items
    ]


def rules_as_dict(rules: Rules) -> dict[str, Any]:
    """Rules as JSON."""
    return {**asdict(rules), "slots": list(rules.slots)}


def rules_from_dict(record: dict[str, Any]) -> Rules:
    """The inverse of `rules_as_dict`."""
    return Rules(**{**record, "slots": tuple(record["slots"])})


# ---- state -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Engine:
    version: int
    free: list[int]
    """Heap of free slots: the lowest is taken first."""
    running: int = 0
    target: int = -1
    """Version that it is due to load."""
    syncing: bool = False

    @property
    def admits(self) -> bool:
        """A new episode may start: not behind what it is due to serve, and a slot is free."""
        return bool(self.free) and not self.syncing and self.target <= self.version


@dataclass(slots=True)
class _Group:
    id: int
    version: int
    """Oldest version that any of its tokens can have."""
    unsettled: int
    """Members that are neither finished nor given up."""
    running: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """member -> (attempt, engine, slot)."""
    finished: dict[int, tuple[int, float]] = field(default_factory=dict)
    """member -> (oldest version, reward)."""
    closed: bool = False


class Scheduler:
    """Decides what starts next.

    Args:
        rules: What decides.

    Call `advance()` once to get going, then `advance(event, ...)` with what happened; events that
    happened at the same time go in together.
    """

    def __init__(self, rules: Rules) -> None:
        """Nothing is running; every engine serves `rules.first_version`."""
        self.rules = rules
        self.version = rules.first_version
        self.step = rules.first_step
        self._engines = [
            _Engine(version=self.version, free=list(range(slots)), target=self.version)
            for slots in rules.slots
        ]
        self._groups: dict[int, _Group] = {}
        self._next_group = rules.first_group
        self._waiting: deque[tuple[int, int, int]] = deque()
        """(group, member, attempt) admitted but without a slot."""
        self._reissue: deque[int] = deque()
        """Groups whose task is to be issued again."""
        self._admitted = self.version * rules.groups_per_step
        """Groups trained, buffered or running: refunds are taken out again."""
        self._training = False
        self._buffer = _Buffer(rules)
        self._actions: list[Action] = []

    @property
    def is_over(self) -> bool:
        """All steps are done."""
        return bool(self.rules.steps) and self.step >= self.rules.steps

    @property
    def num_running(self) -> int:
        """Episodes in slots."""
        return sum(engine.running for engine in self._engines)

    @property
    def num_buffered(self) -> int:
        """Closed groups that wait for the trainer."""
        return len(self._buffer)

    @property
    def waits_for(self) -> str:
        """Who holds the pipeline up, in words."""
        if any(engine.syncing for engine in self._engines):
            return "sync"
        if any(engine.target > engine.version for engine in self._engines):
            return "engines drain before a sync"
        if self._training:
            full = self._admitted >= self._budget and not self._waiting and not self.num_running
            return "trainer (engines wait at the staleness bound)" if full else ""
        if len(self._buffer) >= self.rules.groups_per_step:
            return "trainer waits for groups that are due"
        return "trainer waits for episodes"

    def advance(self, *events: Event) -> list[Action]:
        """Take note of what happened and decide what starts."""
        self._actions = []
        for event in events:
            self._note(event)
        self._start_syncs()
        self._fill_slots()
        if self._start_training():
            self._fill_slots()
        return self._actions

    @property
    def _budget(self) -> int:
        """Groups that may have been admitted so far."""
        return (self.version + 1 + self.rules.staleness) * self.rules.groups_per_step

    # ---- events

    def _note(self, event: Event) -> None:
        match event:
            case EpisodeFinished():
                self._episode_finished(event)
            case GroupTimedOut(group=group):
                self._group_timed_out(group)
            case TrainingFinished(version=version):
                self._training_finished(version)
            case SyncFinished(engine=index, version=version):
                self._engines[index].version = version
                self._engines[index].syncing = False

    def _training_finished(self, version: int) -> None:
        assert version - self.version in (0, 1), "versions grow by one"
        self._training = False
        self.step += 1
        if version == self.version:
            self._admitted -= self.rules.groups_per_step
            return
        self.version = version
        if version % self.rules.sync_every == 0:
            for engine in self._engines:
                engine.target = max(engine.target, version - self.rules.delay)

    def _episode_finished(self, event: EpisodeFinished) -> None:
        group = self._groups[event.group]
        attempt, engine, slot = group.running.pop(event.member)
        assert attempt == event.attempt, "an attempt finishes once"
        self._engines[engine].running -= 1
        heapq.heappush(self._engines[engine].free, slot)
        if group.closed:
            if not group.running:
                del self._groups[group.id]
            return
        if event.ok:
            version = event.version if event.version >= 0 else group.version
            group.finished[event.member] = (version, event.reward)
        elif attempt < self.rules.retries:
            self._waiting.appendleft((group.id, event.member, attempt + 1))
            return
        group.unsettled -= 1
        if not group.unsettled:
            whole = len(group.finished) == self.rules.samples_per_group
            self._close(group, "complete" if whole else "partial")

    def _group_timed_out(self, index: int) -> None:
        group = self._groups.get(index)
        if group is None or group.closed:
            return
        for member, (attempt, _, _) in group.running.items():
            self._actions.append(AbortEpisode(group.id, member, attempt))
        self._close(group, "timeout")

    def _close(self, group: _Group, reason: CloseReason) -> None:
        members = tuple(sorted(group.finished))
        rewards = {reward for _, reward in group.finished.values()}
        drop: DropReason | None = None
        if len(members) < self.rules.min_survivors:
            drop = reason = "timeout" if reason == "timeout" else "failed"
        elif self.rules.refill_zero_variance and len(rewards) == 1:
            drop = reason = "zero_variance"
        group.closed = True
        self._actions.append(CloseGroup(group.id, reason, members))
        self._buffer.forget(group.version)
        if not group.running:
            del self._groups[group.id]
        if reason in ("partial", "failed", "timeout"):
            self._reissue.append(group.id)
        if drop is not None:
            self._drop(group.id, drop)
            return
        self._buffer.add(group.id, min(version for version, _ in group.finished.values()))

    def _drop(self, group: int, reason: DropReason) -> None:
        self._admitted -= 1
        self._actions.append(DropGroup(group, reason))

    # ---- decisions

    def _start_syncs(self) -> None:
        for index, engine in enumerate(self._engines):
            due = engine.target > engine.version and not engine.syncing
            if due and (self.rules.sync_mode == "interrupt" or not engine.running):
                engine.syncing = True
                self._actions.append(StartSync(index, engine.target))

    def _fill_slots(self) -> None:
        if self.is_over:
            return
        while (index := self._freest_engine()) is not None:
            if not self._waiting and not self._admit():
                return
            group, member, attempt = self._waiting.popleft()
            if group not in self._groups or self._groups[group].closed:
                continue
            engine = self._engines[index]
            slot = heapq.heappop(engine.free)
            engine.running += 1
            self._groups[group].running[member] = (attempt, index, slot)
            self._actions.append(StartEpisode(group, member, attempt, index, slot))

    def _freest_engine(self) -> int | None:
        admitting = [index for index, engine in enumerate(self._engines) if engine.admits]
        return max(admitting, key=lambda i: (len(self._engines[i].free), -i), default=None)

    def _admit(self) -> bool:
        """Admit a whole group, if the bound allows; its first member starts now."""
        if self._admitted >= self._budget:
            return False
        # An engine that is behind what it is due to serve starts nothing before it has caught up.
        version = min(max(engine.version, engine.target) for engine in self._engines)
        group = _Group(id=self._next_group, version=version, unsettled=self.rules.samples_per_group)
        self._next_group += 1
        self._admitted += 1
        self._groups[group.id] = group
        self._buffer.expect(version)
        self._waiting.extend((group.id, member, 0) for member in range(group.unsettled))
        reissue_of = self._reissue.popleft() if self._reissue else -1
        self._actions.append(StartGroup(group.id, reissue_of))
        return True

    def _start_training(self) -> bool:
        """Start a step if one can; True if slots may have become free to fill by refunds."""
        busy = self._training or any(
            engine.syncing or engine.target > engine.version for engine in self._engines
        )
        if busy or self.is_over:
            return False
        stale = self._buffer.take_stale(self.version)
        for group in stale:
            self._drop(group, "stale")
            if self.rules.consume == "requeue":
                self._reissue.append(group)
        batch = self._buffer.take_batch(self.version)
        if batch:
            self._training = True
            self._actions.append(StartTraining(self.version, tuple(batch)))
        return bool(stale)


class _Buffer:
    """Closed groups in the order in which they may be consumed.

    `wait` takes the earliest deadline first, where a group's deadline is its version + bound, and
    takes a batch at step v only if afterwards, for every k ≤ η, the groups (closed or not) due by
    v + k fit into k batches. The other policies take the oldest finished first; `drop` and
    `requeue` first discard what is beyond the bound.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._closed = 0
        self._by_version: list[tuple[int, int, int]] = []
        """Heap of (version, order of closing, group); entries of taken groups are skipped."""
        self._groups: dict[int, int] = {}
        """group -> version, in order of closing."""
        self._ready: Counter[int] = Counter()
        """Closed groups per version."""
        self._unfinished: Counter[int] = Counter()
        """Open groups per version."""

    def __len__(self) -> int:
        return len(self._groups)

    def expect(self, version: int) -> None:
        """An open group may hold a token of `version`."""
        self._unfinished[version] += 1

    def forget(self, version: int) -> None:
        """An open group closed."""
        _decrement(self._unfinished, version)

    def add(self, group: int, version: int) -> None:
        """A closed group waits for the trainer; its oldest token is of `version`."""
        self._closed += 1
        self._groups[group] = version
        self._ready[version] += 1
        heapq.heappush(self._by_version, (version, self._closed, group))

    def take_stale(self, version: int) -> list[int]:
        """Remove the groups that hold a token beyond the bound, where the policy discards them."""
        if self._rules.consume not in ("drop", "requeue"):
            return []
        stale = []
        while self._groups and self._oldest()[0] < version - self._rules.bound:
            stale.append(self._take(self._oldest()[2]))
        return stale

    def take_batch(self, version: int) -> list[int]:
        """Remove and return the groups of the step at `version`; empty if it has to wait."""
        size = self._rules.groups_per_step
        if len(self._groups) < size:
            return []
        if self._rules.consume == "wait":
            if not self._leaves_room(version):
                return []
            return [self._take(self._oldest()[2]) for _ in range(size)]
        order = iter(self._groups)
        return [self._take(group) for group in [next(order) for _ in range(size)]]

    def _leaves_room(self, version: int) -> bool:
        """Taking the most urgent batch now leaves every later deadline within reach."""
        size, bound = self._rules.groups_per_step, self._rules.bound
        for k in range(self._rules.staleness + 1):
            due = version + k - bound
            ready = sum(n for v, n in self._ready.items() if v <= due)
            unfinished = sum(n for v, n in self._unfinished.items() if v <= due)
            if ready + unfinished - min(size, ready) > k * size:
                return False
        return True

    def _oldest(self) -> tuple[int, int, int]:
        while self._by_version[0][2] not in self._groups:
            heapq.heappop(self._by_version)
        return self._by_version[0]

    def _take(self, group: int) -> int:
        _decrement(self._ready, self._groups.pop(group))
        return group


def _decrement(counter: Counter[int], key: int) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
