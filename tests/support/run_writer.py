"""Writes run directories by hand, row by row."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trueup.config import as_toml, load
from trueup.records.directory import RunDirectory
from trueup.records.ledger import Ledger
from trueup.records.tokens import EpisodeRow
from trueup.types import Episode, EpisodeStatus, Segment, Span, Turn


@dataclass
class RunWriter:
    """A run directory under construction; times are seconds since the start."""

    root: Path
    name: str = "demo"
    overrides: tuple[str, ...] = ()
    directory: RunDirectory = field(init=False)
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.directory = RunDirectory.create(self.root, self.name)
        self.directory.config.write_text(as_toml(load("", self.overrides)))
        self.ledger = Ledger.create(self.directory.ledger)

    @property
    def path(self) -> Path:
        return self.directory.path

    def add(self, t: float, kind: str, *, actor: str = "controller", **columns: Any) -> None:
        keys = ("episode", "attempt", "group", "version", "engine")
        plain = {key: columns.pop(key) for key in keys if key in columns}
        self.ledger.append(kind, actor=actor, t_mono=t, payload=columns, **plain)

    def issue(
        self, t: float, episode: str, *, version: int = 0, slot: int = 0, **more: Any
    ) -> None:
        known = {"group": 0, "member": 0, "attempt": 0, "task": "a", "split": "train"}
        columns = known | {"engine": "engine-0"} | more
        self.add(t, "issue", episode=episode, version=version, slot=slot, **columns)

    def finish(
        self, t: float, episode: str, *, spans: list[list[Any]], reward: float | None, **more: Any
    ) -> None:
        tokens = sum(span[3] for span in spans)
        known = {"group": 0, "attempt": 0, "status": "done", "failure": None, "turns": 1}
        sizes = {"tokens": 2 * tokens, "action_tokens": tokens, "counters": {}}
        times = {"t_submit": t, "t_start": t, "t_end": t}
        columns = known | sizes | times | more
        self.add(t, "finish", episode=episode, spans=spans, reward=reward, **columns)

    def close(self) -> Path:
        self.ledger.close()
        return self.path


def episode_row(
    name: str,
    *,
    task: str = "a",
    group: int = 0,
    reward: float | None = 1.0,
    version: int = 0,
    step_version: int = 0,
    staleness: float = 0.0,
    engine: float = 0.0,
    weight: float = 1.0,
    world: int = 3,
    actions: int = 4,
    trained: bool = True,
    keep: bool = True,
) -> EpisodeRow:
    """A segment of `world` tokens and `actions` action tokens with constant parts of the gap."""
    lag = step_version - version
    target = [-1.0 - 0.1 * i for i in range(actions)]
    at_version = [x - staleness for x in target]
    behaviour = [x - engine for x in at_version]
    segment = Segment(
        token_ids=array("i", range(world + actions)),
        action=array("b", [0] * world + [1] * actions),
        turn=array("i", [0] * (world + actions)),
        logp_behaviour=array("f", behaviour),
        spans=(
            Span(
                start=0,
                stop=actions,
                version=version,
                engine="engine-0",
                epoch=0,
                precision="float32",
            ),
        ),
    )
    episode = Episode(
        id=name,
        task=task,
        group=group,
        member=0,
        attempt=0,
        segments=(segment,),
        turns=(Turn(t_start=0.0, t_end=1.0, tokens_in=world, tokens_out=actions),),
        status=EpisodeStatus.DONE,
        reward=reward,
    )
    if not trained:
        return EpisodeRow(episode=episode, reason="stale")
    return EpisodeRow(
        episode=episode,
        logp_target=target,
        logp_version=at_version,
        weight=[weight] * actions,
        keep=[keep] * actions,
        advantage=[0.5] * actions,
        lag_in_flight=[min(1, lag)] * actions,
        lag_in_queue=[lag - min(1, lag)] * actions,
    )
