"""Training on an engine that lies: what the run itself finds, and in which load or step.

One process, everything real but the scheduler: a trainer that learns, versions that are published,
an engine that loads them and samples, probes, and the learner that judges both.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.embedded import POSITIONS, VOCABULARY, tiny
from trueup import config
from trueup.engines.base import Engine
from trueup.engines.embedded.core import EmbeddedCore
from trueup.engines.embedded.engine import EmbeddedEngine
from trueup.engines.lying import FAULTS, Forge, plant
from trueup.records.directory import RunDirectory
from trueup.sync.digest import digest
from trueup.sync.inprocess import InProcessTransport
from trueup.training.learner import Learner
from trueup.training.messages import Consumed, ProbeReport
from trueup.training.payload import PayloadStore
from trueup.training.probe import ProbeSet, decode
from trueup.training.trainer import TorchTrainer
from trueup.types import (
    Episode,
    EpisodeStatus,
    GenerateRequest,
    LoadReceipt,
    SamplingParams,
    Segment,
)

EPISODES, PROMPT, ACTIONS = 8, 4, 24


@dataclass
class Life:
    """A run of a few steps."""

    root: Path
    fault: str = ""
    seed: int = 0
    overrides: tuple[str, ...] = ()
    tamper: Any = None
    """What becomes of a receipt on its way."""
    reports: list[ProbeReport] = field(default_factory=list)
    failed: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Health verdict -> steps in which it failed."""
    gaps: list[float] = field(default_factory=list)
    """Mean |engine term| of each step."""

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        demands = FAULTS[self.fault].demands if self.fault else {}
        keys = [f"engine.{k}={v}" for k, v in demands.items() if k == "kv_mode"]
        settings = ("train.minibatches=1", "train.lr=2e-3", f"seed={self.seed}", *self.overrides)
        self.config = config.load("", (*settings, *keys))
        run = RunDirectory.create(self.root, f"run-{self.seed}")
        self.store, self.transport = PayloadStore(run.path), InProcessTransport()
        self.trainer = TorchTrainer(
            tiny(seed=self.seed),
            self.config.train,
            temperature=self.config.engine.temperature,
            seed=self.seed,
            keep_versions=3,
        )
        self.learner = Learner(
            self.config,
            run,
            self.trainer,
            self.store,
            publish=self.transport.publish,
            retire=self.transport.retire,
            close=self.transport.close,
            tokenizer_files_from=self.root,
        )
        self.probes = ProbeSet.of(self.config, vocabulary=VOCABULARY, positions=POSITIONS)

    def _engine(self) -> Engine:
        forge = Forge(self.transport.fetch, digest)
        engine = self.config.engine
        core = EmbeddedCore(
            tiny(dtype=engine.dtype),
            engine_id="engine-0",
            slots=16,
            dtype=engine.dtype,
            quantize=engine.quantize,
            kv_mode=engine.kv_mode,
            fetch=forge,
            digest=digest,
        )
        honest = EmbeddedEngine(core)
        return plant(honest, self.fault, seed=1, forge=forge) if self.fault else honest

    def live(self, steps: int) -> Life:
        asyncio.run(self._live(steps))
        return self

    async def _live(self, steps: int) -> None:
        engine = self._engine()
        manifest = await self.learner.publish()
        for step in range(steps):
            receipt = await engine.load(manifest)
            receipt = self.tamper(receipt) if self.tamper else receipt
            await self._probe(engine, receipt, step)
            consumed = [await self._sample(engine, step, member) for member in range(EPISODES)]
            report = await self.learner.update(step, consumed, ())
            for metric in report.metrics:
                if metric.name.startswith("health/") and metric.sum:
                    self.failed[metric.name.removeprefix("health/")].append(step)
                if metric.name == "gap/abs_engine":
                    self.gaps.append(metric.sum / metric.count)
            assert report.manifest is not None
            manifest = report.manifest
        await engine.close()

    async def _probe(self, engine: Engine, receipt: LoadReceipt, load: int) -> None:
        episodes = await decode(engine, self.probes, name=f"probe-{load}")
        names = tuple(self.store.put(episode).id for episode in episodes)
        self.reports.append(await self.learner.probed(receipt, names))

    async def _sample(self, engine: Engine, step: int, member: int) -> Consumed:
        name = f"s{step}-{member}"
        prompt = array("i", [(step + member + i) % VOCABULARY for i in range(PROMPT)])
        sampling = SamplingParams(
            max_tokens=ACTIONS,
            stop_ids=(),
            temperature=self.config.engine.temperature,
            key=(self.seed, step, member),
        )
        said = await engine.generate(
            GenerateRequest(session=name, prompt_ids=prompt, sampling=sampling)
        )
        await engine.release(name)
        segment = Segment(
            token_ids=prompt + said.token_ids,
            action=array("b", [0] * PROMPT + [1] * ACTIONS),
            turn=array("i", [0] * (PROMPT + ACTIONS)),
            logp_behaviour=said.logps,
            spans=said.spans,
        )
        self.store.put(
            Episode(
                id=name,
                task="t",
                group=step,
                member=member,
                attempt=0,
                segments=(segment,),
                turns=(),
                status=EpisodeStatus.DONE,
                reward=float(member % 2),
            )
        )
        return Consumed(episode=name, finished_version=self.trainer.version)

    @property
    def alarms(self) -> list[set[str]]:
        """Names of the verdicts that each load failed."""
        return [{name for name, _ in report.alarms} for report in self.reports]


@pytest.mark.parametrize(
    "overrides", [(), ("engine.quantize=int8",), ("engine.quantize=fp8_row",), ("train.lr=0.0",)]
)
def test_an_honest_engine_raises_no_alarm(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """48 loads in all; at a chance below 1e-4 each, an alarm has one below .005."""
    for seed in range(2):
        life = Life(tmp_path, seed=seed, overrides=overrides).live(6)
        assert life.alarms == [set()] * 6
        assert not {"labels", "floor", "digest", "probe", "grid"} & life.failed.keys()


def test_a_stale_head_is_found_by_the_probe_of_the_first_update(tmp_path: Path) -> None:
    life = Life(tmp_path, "stale_head").live(3)
    assert life.alarms[0] == set()
    assert all("probe" in alarms for alarms in life.alarms[1:])
    assert "tied LM head" in life.reports[1].alarms[0][1]
    assert life.failed["probe"] == [1, 2]


def test_a_surviving_prefix_cache_is_found_because_prompts_are_the_same(tmp_path: Path) -> None:
    life = Life(tmp_path, "surviving_prefix_cache").live(3)
    assert life.alarms[0] == set()
    assert all("probe" in alarms for alarms in life.alarms[1:])
    assert life.failed["probe"] == [1, 2]


def test_raw_log_probs_at_another_temperature_are_found_at_the_first_load(tmp_path: Path) -> None:
    life = Life(tmp_path, "raw_logprobs", overrides=("engine.temperature=0.7",)).live(1)
    assert "probe" in life.alarms[0]
    honest = Life(tmp_path, seed=1, overrides=("engine.temperature=0.7",)).live(1)
    assert honest.alarms == [set()]


def test_a_quantisation_that_does_nothing_is_found_though_it_lowers_the_gap(
    tmp_path: Path,
) -> None:
    life = Life(tmp_path, "noop_quantisation").live(1)
    assert life.alarms[0] == {"grid"}
    real = Life(tmp_path, seed=1, overrides=("engine.quantize=int8",)).live(1)
    assert real.alarms == [set()]
    mean, honest = life.reports[0].mean, real.reports[0].mean
    assert mean is not None
    assert honest is not None
    assert mean < honest / 2


def test_an_update_that_never_arrived_is_found_by_the_label_test_and_not_by_the_mean(
    tmp_path: Path,
) -> None:
    """Rounding to INT8 is larger than a small update, so every mean looks sound; what the tokens
    follow does not."""
    quiet = ("engine.quantize=int8", "train.lr=1e-4", "attribution.label_test=1.0")
    life = Life(tmp_path, "missed_update", overrides=quiet).live(4)
    honest = Life(tmp_path, seed=1, overrides=quiet).live(4)
    assert not any("probe" in alarms for alarms in life.alarms)
    assert "floor" not in life.failed
    assert life.failed["labels"]
    assert "labels" not in honest.failed


def test_an_update_that_never_arrived_is_found_by_an_honest_digest(tmp_path: Path) -> None:
    first: list[str] = []

    def never_updated(receipt: LoadReceipt) -> LoadReceipt:
        first.append(receipt.digest)
        return replace(receipt, digest=first[0])

    life = Life(tmp_path, tamper=never_updated).live(3)
    assert life.alarms == [set(), {"digest"}, {"digest"}]
    assert life.failed["digest"] == [1, 2]
