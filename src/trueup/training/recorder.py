"""The controller's pen: one method per kind of ledger row (`records.schema`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trueup.records.ledger import Ledger
from trueup.records.tables import StepRow, VersionRow
from trueup.scheduling import Action, Event, Rules, encode, rules_as_dict
from trueup.training.messages import EpisodeSpec, ProbeReport, StepReport
from trueup.types import Activity, EpisodeRef, LoadReceipt, WeightManifest


class Recorder:
    """Writes what happened, in the order in which it is told."""

    def __init__(self, ledger: Ledger) -> None:
        """The ledger is open for writing and has no other writer."""
        self._ledger = ledger

    def begin(self, rules: Rules, config_digest: str) -> None:
        """A run starts from nothing."""
        self._note(
            "run_start",
            payload={"config_digest": config_digest, "schedule": rules_as_dict(rules)},
        )

    def resume(
        self, rules: Rules, step: int, path: str, skipped: Sequence[tuple[str, str]]
    ) -> None:
        """A run goes on from a checkpoint."""
        self._note(
            "resume",
            version=rules.first_version,
            payload={
                "step": step,
                "path": path,
                "skipped": [list(item) for item in skipped],
                "schedule": rules_as_dict(rules),
            },
        )

    def tick(self, events: Sequence[Event], actions: Sequence[Action]) -> None:
        """What the scheduler was told and what it decided."""
        self._note("tick", payload={"events": encode(events), "actions": encode(actions)})

    def issue(self, spec: EpisodeSpec, *, version: int, slot: int) -> None:
        """An attempt starts."""
        self._note(
            "issue",
            episode=spec.id,
            attempt=spec.attempt,
            group=spec.group,
            version=version,
            engine=engine_id(spec.engine),
            payload={
                "task": spec.task.id,
                "member": spec.member,
                "slot": slot,
                "split": spec.task.split,
            },
        )

    def finish(self, ref: EpisodeRef) -> None:
        """An attempt ended, well or not."""
        failure = ref.failure and [ref.failure.kind, ref.failure.reason, ref.failure.message]
        self._note(
            "finish",
            episode=ref.id,
            attempt=ref.attempt,
            group=ref.group,
            payload={
                "status": ref.status,
                "reward": ref.reward,
                "failure": failure,
                "tokens": ref.tokens,
                "action_tokens": ref.action_tokens,
                "turns": ref.turns,
                "counters": ref.counters,
                "spans": [list(span) for span in ref.spans],
                "t_submit": ref.t_submit,
                "t_start": ref.t_start,
                "t_end": ref.t_end,
            },
        )

    def close(
        self, group: int, *, reason: str, survivors: Sequence[str], task: str, draw: int
    ) -> None:
        """A group will not change any more."""
        self._note(
            "close",
            group=group,
            payload={
                "reason": reason,
                "survivors": list(survivors),
                "task": task,
                "stream": draw,
            },
        )

    def claim(self, group: int, *, version: int, step: int, episodes: Sequence[str]) -> None:
        """A step consumes a group."""
        payload = {"step": step, "episodes": list(episodes)}
        self._note("claim", group=group, version=version, payload=payload)

    def drop(self, group: int, *, version: int, reason: str, episodes: Sequence[str]) -> None:
        """A group is given up."""
        payload = {"reason": reason, "episodes": list(episodes)}
        self._note("drop", group=group, version=version, payload=payload)

    def trained(self, report: StepReport) -> None:
        """A training step is over: committed if it published a version, else skipped."""
        self._note(
            "train",
            actor="trainer",
            version=report.version,
            payload={
                "step": report.step,
                "t0": report.t0,
                "t1": report.t1,
                "phases": report.phases,
            },
        )
        self._ledger.record_metrics(
            report.step,
            {m.name: m for m in report.metrics},
            {m.name: m.sketch for m in report.metrics if m.sketch is not None},
        )
        self._ledger.record_step(
            StepRow(
                step=report.step,
                version=report.version,
                episodes=len(report.episodes),
                tokens=report.tokens,
                t0=report.t0,
                t1=report.t1,
            )
        )
        kind = "skip"
        if report.manifest is not None:
            kind = "commit"
            self.published(report.manifest, *report.t_publish)
        payload = {"step": report.step, "episodes": list(report.episodes)}
        self._note(kind, version=report.version, payload=payload)

    def published(self, manifest: WeightManifest, t0: float, t1: float) -> None:
        """A version can be fetched."""
        self._note(
            "publish",
            actor="trainer",
            version=manifest.version,
            payload={
                "digest": manifest.digest,
                "nbytes": manifest.nbytes,
                "n_changed": manifest.n_changed,
                "t0": t0,
                "t1": t1,
            },
        )
        self._ledger.record_version(
            VersionRow(
                version=manifest.version,
                digest=manifest.digest,
                n_changed=manifest.n_changed,
                nbytes=manifest.nbytes,
            )
        )

    def applied(self, receipt: LoadReceipt, *, nbytes: int) -> None:
        """An engine attests a version of so many bytes."""
        self._note(
            "apply",
            actor=receipt.engine,
            engine=receipt.engine,
            version=receipt.version,
            payload={
                "epoch": receipt.epoch,
                "digest": receipt.digest,
                "t_start": receipt.t_start,
                "t_staged": receipt.t_staged,
                "t_end": receipt.t_end,
                "tokens_recomputed": receipt.tokens_recomputed,
                "nbytes": nbytes,
                "prepare_s": receipt.prepare_s,
                "pause_s": receipt.pause_s,
            },
        )

    def probed(self, report: ProbeReport) -> None:
        """A load was probed, or raised an alarm without."""
        self._note(
            "probe",
            actor=report.engine,
            engine=report.engine,
            version=report.version,
            payload={
                "epoch": report.epoch,
                "tokens": report.tokens,
                "cached": report.cached,
                "mean": report.mean,
                "p99": report.p99,
                "max": report.max,
                "floor": report.floor,
                "limit": report.limit,
                "alarms": [list(alarm) for alarm in report.alarms],
            },
        )

    def activity(self, engine: int, stretches: Sequence[Activity]) -> None:
        """What an engine decoded since the last time."""
        name = engine_id(engine)
        rows = [[a.t0, a.t1, a.tokens_decoded, a.tokens_prefilled, a.steps] for a in stretches]
        self._note("activity", actor=name, engine=name, payload={"stretches": rows})

    def evaluated(self, step: int, version: int, refs: Sequence[EpisodeRef]) -> None:
        """Held-out tasks were sampled; what failed is counted apart and never as a miss."""
        graded = [ref for ref in refs if ref.reward is not None]
        passed = sum(ref.reward == 1.0 for ref in graded)
        by_task: dict[str, list[int]] = {}
        for ref in graded:
            by_task.setdefault(ref.task, []).append(int(ref.reward == 1.0))
        reads = sum(ref.counters.get("reads", 0) for ref in graded)
        self._note(
            "eval",
            version=version,
            payload={
                "step": step,
                "heldout_pass_rate": passed / len(graded) if graded else None,
                "reads_per_episode": reads / len(graded) if graded else None,
                "episodes": len(graded),
                "failed": len(refs) - len(graded),
                "passed": passed,
                "by_task": [[task, sum(found), len(found)] for task, found in by_task.items()],
            },
        )

    def checkpoint(self, step: int, version: int, path: str, digest: str) -> None:
        """A checkpoint is whole on the disk."""
        payload = {"step": step, "path": path, "digest": digest}
        self._note("checkpoint", version=version, payload=payload)
        self._ledger.flush(durable=True)

    def end(self, version: int, reason: str, message: str) -> None:
        """The run is over."""
        self._note("run_end", version=version, payload={"reason": reason, "message": message})
        self._ledger.flush(durable=True)

    def flush(self) -> None:
        """Commit what was written."""
        self._ledger.flush()

    def _note(self, kind: str, *, actor: str = "controller", **columns: Any) -> None:
        self._ledger.append(kind, actor=actor, **columns)


def engine_id(index: int) -> str:
    """Name of an engine by its index in the schedule."""
    return f"engine-{index}"
