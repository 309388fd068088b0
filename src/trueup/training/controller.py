"""The controller: drives the scheduler with what happens, and does what it decides.

    scheduler ── StartEpisode ──▶ rollout ── EpisodeFinished ──▶ scheduler
              ── StartTraining ─▶ learner ── TrainingFinished ─▶
              ── StartSync ─────▶ engine ─── SyncFinished ─────▶

It holds no rule of its own and no token: the scheduler decides, the ledger holds every event and
every decision, payload travels between the other processes. What each loop waits for:

| loop    | consumes      | waits for                         | is unblocked by                  |
|---------|---------------|-----------------------------------|----------------------------------|
| rollout | slots         | a free slot; the staleness bound  | an episode that ends; a commit   |
| learner | closed groups | a batch; the sync of the last one | a group that closes; a sync      |
| engine  | versions      | a commit (draining: empty slots)  | a commit; the last episode       |
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from trueup.config import Config, as_toml
from trueup.engines.base import Engine
from trueup.errors import Fault, TrueupError
from trueup.scheduling import (
    AbortEpisode,
    Action,
    CloseGroup,
    DropGroup,
    EpisodeFinished,
    Event,
    GroupTimedOut,
    Rules,
    Scheduler,
    StartEpisode,
    StartGroup,
    StartSync,
    StartTraining,
    SyncFinished,
    TrainingFinished,
)
from trueup.training.messages import Consumed, Discarded, EpisodeSpec, StepReport
from trueup.training.ports import LearnerPort, RolloutPort, Start
from trueup.training.probing import Probing
from trueup.training.progress import Progress
from trueup.training.recorder import Recorder
from trueup.training.task_stream import TaskStream
from trueup.types import EpisodeRef, EpisodeStatus, Task, WeightManifest

_HEALTHY = (EpisodeStatus.DONE, EpisodeStatus.TURN_LIMIT, EpisodeStatus.TRUNCATED)
_FAILURES_IN_A_ROW = 4
"""Step batches' worth of failed attempts without one that ended well: nothing can proceed."""
_EVALUATION_KEY = 1 << 40
"""Noise keys of evaluation lie beyond every draw of the task stream."""


@dataclass(slots=True)
class _Group:
    draw: int
    round: int
    """How often this draw had been issued before."""
    task: Task
    attempts: list[str] = field(default_factory=list)
    members: dict[int, EpisodeRef] = field(default_factory=dict)
    """Members that ended well; only the survivors once the group is closed."""
    finished_version: dict[str, int] = field(default_factory=dict)
    """Trainer's version when an episode finished."""
    closed: bool = False


class Controller:
    """Runs a configuration to its end.

    Args:
        config: The run.
        recorder: Writes the ledger.
        engines: By index.
        rollout: Runs episodes on them.
        learner: Trains.
        tasks: Training tasks.
        heldout: Evaluation tasks.
        start: Where it begins.
        on_step: Told after every step.
    """

    def __init__(
        self,
        config: Config,
        recorder: Recorder,
        *,
        engines: Sequence[Engine],
        rollout: RolloutPort,
        learner: LearnerPort,
        tasks: Sequence[Task],
        heldout: Sequence[Task],
        start: Start,
        on_step: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """Nothing runs yet."""
        self._config = config
        self._recorder = recorder
        self._engines = engines
        self._rollout = rollout
        self._learner = learner
        self._probing = Probing(config.probe, rollout, learner, recorder)
        self._heldout = heldout
        self._start = start
        self._on_step = on_step
        self._rules = rules_of(config, start)
        self._scheduler = Scheduler(self._rules)
        self._stream = TaskStream(tasks, config.seed, **start.stream)
        self._groups: dict[int, _Group] = {}
        self._issue_again: dict[int, tuple[int, int]] = {}
        """(draw, round) of groups whose task the scheduler will issue again."""
        self._manifests: dict[int, WeightManifest] = {}
        self._serving = [-1] * len(engines)
        self._discarded: list[Discarded] = []
        self._happened: asyncio.Queue[Event | None] = asyncio.Queue()
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._fault: TrueupError | None = None
        self._interrupted = ""
        self._evaluation_due = False
        self._failures_in_a_row = 0
        self._trained = 0
        self._reported: list[tuple[StepReport, Sequence[int]]] = []
        """The step that the learner has finished and the scheduler does not know of yet, and the
        draws it consumed."""
        self._t_start = time.monotonic()

    def interrupt(self, reason: str) -> None:
        """Stop after what is in progress: checkpoint, then return."""
        self._interrupted = self._interrupted or reason
        self._happened.put_nowait(None)

    def fail(self, error: TrueupError) -> None:
        """A part of the system is lost: stop. The first cause is the one that is raised."""
        self._fault = self._fault or error
        self._happened.put_nowait(None)

    async def run(self) -> str:
        """Train to the end.

        Returns:
            `done` or `interrupted`.

        Raises:
            TrueupError: The first fault that stopped the run; it is in the ledger.
        """
        try:
            await self._begin()
            await self._loop()
            await self._finish()
        except TrueupError as error:
            self.fail(error)
        if self._fault is not None:
            await self._cancel_all()
            self._recorder.end(self._scheduler.version, "fault", self._fault.message)
            raise self._fault
        reason = "interrupted" if self._interrupted else "done"
        self._recorder.end(self._scheduler.version, reason, self._interrupted)
        return reason

    # ---- beginning, middle, end

    async def _begin(self) -> None:
        start = self._start
        if start.resumed_from:
            self._recorder.resume(self._rules, start.step, start.resumed_from, start.skipped)
            for group, episodes in start.abandoned:
                self._recorder.drop(
                    group, version=start.version, reason="resume", episodes=episodes
                )
        else:
            digest = hashlib.sha256(as_toml(self._config).encode()).hexdigest()
            self._recorder.begin(self._rules, digest)
        t0 = time.monotonic()
        manifest = await self._learner.publish()
        self._manifests[manifest.version] = manifest
        self._recorder.published(manifest, t0, time.monotonic())
        await asyncio.gather(*(self._load(i, start.version) for i in range(len(self._engines))))
        if not start.resumed_from:
            await self._evaluate(0)
        self._t_start = time.monotonic()

    async def _loop(self) -> None:
        events: list[Event] = []
        while not (self._fault or self._interrupted):
            actions = self._advance(events)
            if self._scheduler.is_over:
                self._settle_groups(actions)
                return
            synced = any(isinstance(event, SyncFinished) for event in events)
            if self._evaluation_due and synced and len(set(self._serving)) == 1:
                self._evaluation_due = False
                await self._evaluate(self._scheduler.step)
            for action in actions:
                self._act(action)
            self._recorder.flush()
            events = await self._next_events()

    def _advance(self, events: Sequence[Event]) -> list[Action]:
        """Record what happened, tell the scheduler, record what it decided."""
        for event in events:
            if isinstance(event, TrainingFinished):
                self._commit(*self._reported.pop())
        actions = self._scheduler.advance(*events)
        self._recorder.tick(events, actions)
        return actions

    async def _next_events(self) -> list[Event]:
        """What happened: waits for something, then takes all that is there."""
        first = await self._happened.get()
        return [event for event in (first,) if event is not None] + self._waiting_events()

    def _waiting_events(self) -> list[Event]:
        found = [self._happened.get_nowait() for _ in range(self._happened.qsize())]
        return [event for event in found if event is not None]

    async def _finish(self) -> None:
        """Withdraw what runs, write the last checkpoint, evaluate the last version."""
        await self._wait_for("train")
        await self._wait_for("sync")
        await asyncio.gather(*(self._rollout.abort(episode) for episode in self._running()))
        await self._wait_for("episode")
        self._settle_groups(self._advance(self._waiting_events()))
        for group in list(self._groups):
            self._give_up(group, "run_end")
        step = self._scheduler.step
        await self._note_activity()
        if self._discarded:
            await self._learner.record(step, tuple(self._discarded))
        await self._checkpoint(step)
        if not self._interrupted:
            for index, version in enumerate(self._serving):
                if version != self._scheduler.version:
                    await self._load(index, self._scheduler.version)
            await self._evaluate(step)
        await self._wait_for("probe")

    def _settle_groups(self, actions: Sequence[Action]) -> None:
        """Nothing starts any more, but what was decided about groups still holds."""
        for action in actions:
            if isinstance(action, CloseGroup | DropGroup):
                self._act(action)

    # ---- actions

    def _act(self, action: Action) -> None:
        match action:
            case StartGroup(group=group, reissue_of=earlier):
                self._start_group(group, earlier)
            case StartEpisode():
                self._start_episode(action)
            case AbortEpisode(group=group, member=member, attempt=attempt):
                self._spawn("abort", self._rollout.abort(_episode_id(group, member, attempt)))
            case CloseGroup():
                self._close_group(action)
            case DropGroup(group=group, reason=reason):
                if reason == "stale" and self._config.schedule.consume == "requeue":
                    self._offer_again(group)
                if group not in self._issue_again:
                    self._stream.commit(self._groups[group].draw)
                self._give_up(group, reason)
            case StartTraining(version=version, groups=groups):
                self._spawn("train", self._train(version, groups))
            case StartSync(engine=engine, version=version):
                self._spawn("sync", self._sync(engine, version))

    def _start_group(self, group: int, reissue_of: int) -> None:
        if reissue_of >= 0:
            draw, times = self._issue_again.pop(reissue_of)
        else:
            draw, times = self._stream.draw(), 0
        self._groups[group] = _Group(draw=draw, round=times, task=self._stream.task(draw))
        if self._config.schedule.timeout_s:
            self._spawn("timer", self._time_out(group))

    def _start_episode(self, action: StartEpisode) -> None:
        group = self._groups[action.group]
        spec = EpisodeSpec(
            id=_episode_id(action.group, action.member, action.attempt),
            task=group.task,
            group=action.group,
            member=action.member,
            attempt=action.attempt,
            engine=action.engine,
            key=(self._config.seed, group.draw, group.round, action.member, action.attempt),
            temperature=self._config.engine.temperature,
            store=True,
        )
        group.attempts.append(spec.id)
        self._recorder.issue(spec, version=self._scheduler.version, slot=action.slot)
        self._spawn(f"episode {spec.id}", self._run_episode(spec))

    def _close_group(self, action: CloseGroup) -> None:
        group = self._groups[action.group]
        group.closed = True
        for member in set(group.members) - set(action.members):
            self._discard(group.members.pop(member).id, "late")
        self._recorder.close(
            action.group,
            reason=action.reason,
            survivors=[group.members[member].id for member in action.members],
            task=group.task.id,
            draw=group.draw,
        )
        if action.reason in ("partial", "failed", "timeout"):
            self._offer_again(action.group)

    def _offer_again(self, group: int) -> None:
        state = self._groups[group]
        self._issue_again[group] = (state.draw, state.round + 1)

    def _give_up(self, group: int, reason: str) -> None:
        state = self._groups.pop(group)
        self._recorder.drop(
            group, version=self._scheduler.version, reason=reason, episodes=state.attempts
        )
        for ref in state.members.values():
            self._discard(ref.id, reason)

    def _discard(self, episode: str, reason: str) -> None:
        self._discarded.append(Discarded(episode=episode, reason=reason))

    # ---- what actions start

    async def _run_episode(self, spec: EpisodeSpec) -> None:
        ref = await self._rollout.run(spec)
        self._recorder.finish(ref)
        ok = ref.status in _HEALTHY
        group = self._groups.get(spec.group)
        if ok and group is not None and not group.closed:
            group.members[spec.member] = ref
            group.finished_version[ref.id] = self._scheduler.version
        else:
            self._discard(ref.id, "late" if ok else _why_not_ok(ref))
        self._watch_failures(ref)
        self._happened.put_nowait(
            EpisodeFinished(
                ref.group, ref.member, ref.attempt, ok, ref.version_min, ref.reward or 0.0
            )
        )

    async def _train(self, version: int, groups: tuple[int, ...]) -> None:
        step = self._scheduler.step
        if step > self._start.step and step % self._config.checkpoint.every == 0:
            await self._checkpoint(step)
        states = {group: self._groups.pop(group) for group in groups}
        consumed = []
        for group, state in states.items():
            episodes = [ref.id for _, ref in sorted(state.members.items())]
            consumed += [
                Consumed(episode=episode, finished_version=state.finished_version[episode])
                for episode in episodes
            ]
            self._recorder.claim(group, version=version, step=step, episodes=episodes)
        discarded, self._discarded = tuple(self._discarded), []
        report = await self._learner.update(step, tuple(consumed), discarded)
        await self._note_activity()
        self._reported.append((report, [state.draw for state in states.values()]))
        self._happened.put_nowait(TrainingFinished(report.version))

    def _commit(self, report: StepReport, draws: Sequence[int]) -> None:
        """A step is over: its version exists, or it learned nothing and was skipped."""
        self._recorder.trained(report)
        if report.manifest is not None:
            self._manifests[report.version] = report.manifest
            self._trained += len(report.episodes)
        for draw in draws:
            self._stream.commit(draw)
        every = self._config.eval.every
        self._evaluation_due |= bool(every) and (report.step + 1) % every == 0
        self._on_step(self._progress(report))

    async def _sync(self, engine: int, version: int) -> None:
        await self._load(engine, version)
        oldest = min(self._serving)
        self._manifests = {v: m for v, m in self._manifests.items() if v >= oldest}
        await self._learner.retire(oldest)
        self._happened.put_nowait(SyncFinished(engine, version))

    async def _load(self, engine: int, version: int) -> None:
        manifest = self._manifests[version]
        receipt = await self._engines[engine].load(manifest)
        self._serving[engine] = receipt.version
        self._recorder.applied(receipt, nbytes=manifest.nbytes)
        self._spawn("probe", self._probing(engine, receipt))

    async def _time_out(self, group: int) -> None:
        await asyncio.sleep(self._config.schedule.timeout_s)
        self._happened.put_nowait(GroupTimedOut(group))

    async def _checkpoint(self, step: int) -> None:
        state = {"step": step, "stream": self._stream.state()}
        path, digest = await self._learner.checkpoint(step, state)
        self._recorder.checkpoint(step, self._scheduler.version, path, digest)

    async def _evaluate(self, step: int) -> None:
        """Sample the held-out tasks on the versions that the engines serve now."""
        samples = self._config.eval.samples
        if not samples:
            return
        specs = [
            EpisodeSpec(
                id=f"e{step:06d}-{index:03d}-{sample:02d}",
                task=task,
                group=-1,
                member=sample,
                attempt=0,
                engine=(index * samples + sample) % len(self._engines),
                key=(self._config.seed, _EVALUATION_KEY + index, 0, sample, 0),
                temperature=self._config.eval.temperature,
                store=False,
            )
            for index, task in enumerate(self._heldout)
            for sample in range(samples)
        ]
        refs = await asyncio.gather(*(self._rollout.run(spec) for spec in specs))
        self._recorder.evaluated(step, min(self._serving), refs)

    async def _note_activity(self) -> None:
        for index, engine in enumerate(self._engines):
            self._recorder.activity(index, await engine.activity())

    # ---- watching

    def _watch_failures(self, ref: EpisodeRef) -> None:
        if ref.status is not EpisodeStatus.FAILED:
            self._failures_in_a_row = 0
            return
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= _FAILURES_IN_A_ROW * self._config.episodes_per_step:
            why = ref.failure.message if ref.failure else ""
            self.fail(
                Fault(
                    f"{self._failures_in_a_row} attempts failed in a row; the last: {why}",
                    field="rollout",
                    rule="an attempt that ends well now and then",
                    value=self._failures_in_a_row,
                )
            )

    def _progress(self, report: StepReport) -> Progress:
        metrics = {metric.name: metric for metric in report.metrics if metric.count}

        def mean(name: str) -> float | None:
            return metrics[name].sum / metrics[name].count if name in metrics else None

        return Progress(
            step=report.step + 1,
            version=report.version,
            reward=mean("episode/reward"),
            mean_lag=mean("gap/lag"),
            max_lag=int(metrics["gap/lag"].max) if "gap/lag" in metrics else None,
            mean_abs_gap=mean("gap/abs_log_ratio"),
            ess=mean("ess/applied_tokens") if "kept/tokens" in metrics else None,
            episodes_per_s=self._trained / (time.monotonic() - self._t_start),
            running=self._scheduler.num_running,
            waiting_groups=self._scheduler.num_buffered,
            who_waits=self._scheduler.waits_for,
            phase="training",
        )

    # ---- tasks

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = name
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task is over; whatever it raised stops the run, also what nobody foresaw."""
        name = self._tasks.pop(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, TrueupError):
            self.fail(error)
            return
        fault = Fault(f"{name}: {error!r}", field="controller")
        fault.__cause__ = error
        self.fail(fault)

    def _running(self) -> list[str]:
        names = self._tasks.values()
        return [name.split()[1] for name in names if name.startswith("episode")]

    async def _wait_for(self, kind: str) -> None:
        """Wait until every task of a kind has ended."""
        while not self._fault:
            tasks = [task for task, name in self._tasks.items() if name.startswith(kind)]
            if not tasks:
                return
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        raise self._fault

    async def _cancel_all(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def rules_of(config: Config, start: Start) -> Rules:
    """The scheduler's rules of a configuration."""
    return Rules(
        groups_per_step=config.train.groups_per_step,
        samples_per_group=config.train.samples_per_group,
        slots=(config.engine.slots,) * config.engine.count,
        staleness=config.schedule.staleness,
        delay=config.sync.delay,
        consume=config.schedule.consume,
        sync_mode=config.schedule.sync_mode,
        sync_every=config.schedule.sync_every,
        retries=config.schedule.retries,
        min_survivors=config.schedule.min_survivors,
        refill_zero_variance=config.train.zero_variance == "refill",
        first_version=start.version,
        first_step=start.step,
        first_group=start.group,
        steps=config.train.steps,
    )


def _episode_id(group: int, member: int, attempt: int) -> str:
    return f"g{group:06d}-{member:02d}-{attempt}"


def _why_not_ok(ref: EpisodeRef) -> str:
    return f"failed: {ref.failure.kind}" if ref.failure else str(ref.status)
