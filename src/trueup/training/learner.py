"""The trainer's process: from references to a published version, one step batch at a time.

    payload store → pack → score target → score versions → correct → step → publish → episode table

Tokens come in here from the payload store and leave into the episode table; the controller sees
sizes, digests and metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueup.config import Config
from trueup.corrections.base import Correction
from trueup.diagnostics.metrics import METRICS, Metric
from trueup.gap import PolicyGap
from trueup.models.packed import PackedBatch
from trueup.models.quantization.fake import quantized_logprobs
from trueup.models.quantization.schemes import scheme
from trueup.records.directory import RunDirectory
from trueup.records.tokens import EpisodeRow, write_step
from trueup.training import checkpoint
from trueup.training.corrected import Fused, Scored
from trueup.training.inspector import Inspector
from trueup.training.messages import Consumed, Discarded, MetricValue, ProbeReport, StepReport
from trueup.training.method import Method
from trueup.training.payload import PayloadStore
from trueup.training.step_batch import StepBatch
from trueup.training.step_metrics import Judge, attribution_metrics, batch_metrics, sketches
from trueup.training.trainer import StepResult, TorchTrainer
from trueup.training.version_scores import version_scores
from trueup.types import LoadReceipt, WeightManifest

Publish = Callable[[int, Mapping[str, Tensor]], WeightManifest]


class Learner:
    """Turns consumed episodes into versions.

    Args:
        config: The run.
        run: Its directory.
        trainer: Learns.
        store: Where the tokens are.
        publish: Makes a version's tensors available to engines.
        retire: Frees every published version below one.
        close: Frees everything published.
        tokenizer_files_from: Directory whose tokenizer goes into checkpoints.
    """

    exposed = ("publish", "update", "probed", "record", "checkpoint", "retire", "close")

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        trainer: TorchTrainer,
        store: PayloadStore,
        *,
        publish: Publish,
        retire: Callable[[int], None],
        close: Callable[[], None],
        tokenizer_files_from: Path,
    ) -> None:
        """Nothing is published yet."""
        self._config = config
        self._run = run
        self._trainer = trainer
        self._store = store
        self._publish = publish
        self._retire = retire
        self._close = close
        self._tokenizer = tokenizer_files_from
        self._method = Method(config)
        held = str(next(iter(trainer.export().values())).dtype).removeprefix("torch.")
        trained = f"{held}+{config.train.dtype}"
        self._judge = Judge(config, precision=f"{trained}+{config.engine.precision}")
        self._inspect = Inspector(
            trainer.score, self._on_grid, trained=trained, learns=config.train.lr > 0
        )

    async def publish(self) -> WeightManifest:
        """Publish the version that the trainer starts with."""
        dtype: torch.dtype = getattr(torch, self._config.published_dtype)
        tensors = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in self._trainer.export().items()
        }
        manifest = self._publish(self._trainer.version, tensors)
        self._inspect.published(manifest)
        return manifest

    async def probed(self, receipt: LoadReceipt, episodes: Sequence[str]) -> ProbeReport:
        """Judge a load; the next step records it.

        Args:
            receipt: What the engine attests.
            episodes: Ids of the stored probe; empty if this load is not probed.
        """
        found = [self._store.get(episode) for episode in episodes]
        report = self._inspect(receipt, found, newest=self._trainer.version)
        for episode in episodes:
            self._store.discard(episode)
        return report

    async def retire(self, version: int) -> None:
        """No engine needs a version below this one any more."""
        self._retire(version)

    async def close(self) -> None:
        """Free what is published; engines have what they serve."""
        self._close()

    async def update(
        self, step: int, consumed: Sequence[Consumed], discarded: Sequence[Discarded]
    ) -> StepReport:
        """Train one step batch.

        Args:
            step: Its number.
            consumed: The episodes of its groups.
            discarded: Episodes dropped or failed since the last step: recorded, never trained.

        Raises:
            DataError: An episode breaks its schema, or has no provenance.
        """
        phases = _Phases()
        with phases("load"):
            batch = StepBatch.collect(
                [self._store.get(item.episode) for item in consumed],
                [item.finished_version for item in consumed],
            )
        started = self._trainer.version
        learn = self._learn_fused if self._method.fuses else self._learn_scored
        gap, correction, result, attributed = learn(batch, phases)
        t_publish = time.monotonic()
        manifest = None
        with phases("publish"):
            if result.updates:
                manifest = await self.publish()
        t_published = time.monotonic()
        with phases("record"):
            metrics = {
                **correction.metrics,
                **result.metrics,
                **attributed,
                **batch_metrics(batch, gap),
                **self._inspect.take_metrics(),
            }
            metrics |= self._judge(
                metrics, n_changed=None if manifest is None else manifest.n_changed
            )
            distributions = sketches(gap)
            rows = _rows(batch, gap, correction, started)
            self._write(step, [*rows, *self._discarded(discarded)])
            for item in consumed:
                self._store.discard(item.episode)
        return StepReport(
            step=step,
            version=self._trainer.version,
            manifest=manifest,
            episodes=tuple(item.episode for item in consumed),
            tokens=batch.num_tokens,
            metrics=tuple(
                _value(name, metric, distributions.get(name)) for name, metric in metrics.items()
            ),
            phases=phases.seconds,
            t0=phases.t0,
            t1=time.monotonic(),
            t_publish=(t_publish, t_published),
        )

    async def record(self, step: int, discarded: Sequence[Discarded]) -> None:
        """Write the episodes that were left over when the run ended, as a step of their own."""
        self._write(step, self._discarded(discarded))

    async def checkpoint(self, step: int, state: dict[str, Any]) -> tuple[str, str]:
        """Write a checkpoint; its path within the run and its digest."""
        path = self._run.checkpoint(step)
        digest = checkpoint.save(
            path,
            self._trainer.model,
            self._trainer.optimizer,
            {**state, "version": self._trainer.version},
            tokenizer_files_from=self._tokenizer,
            reference=self._trainer.reference,
        )
        checkpoint.retain(self._run, self._config.checkpoint.keep)
        return str(path.relative_to(self._run.path)), digest

    def _learn_scored(self, batch: StepBatch, phases: _Phases) -> _Learned:
        """Score, attribute, correct, step."""
        with phases("score"):
            target = self._trainer.score(batch.packed)
            assert target is not None, "the current version can always be scored"
        gap, attributed = self._attribute(batch, target, self._trainer.version, phases)
        with phases("correct"):
            correction = self._method(gap)
        with phases("train"):
            frozen = Scored(gap, correction, self._config.train)
            result = self._trainer.step(batch.packed, frozen)
        return gap, correction, result, attributed

    def _learn_fused(self, batch: StepBatch, phases: _Phases) -> _Learned:
        """Step, correcting each micro-batch as it has gone forward; then attribute."""
        version = self._trainer.version

        def correct(whole: PolicyGap) -> Correction:
            with phases("correct"):
                return self._method(whole)

        def correct_part(part: PolicyGap, baseline: Tensor | None) -> Correction:
            with phases("correct"):
                return self._method.part(part, baseline)

        with phases("train"):
            fused = Fused(
                batch.gap(torch.zeros(batch.num_tokens), None, version),
                correct=correct,
                correct_part=correct_part,
                scope=self._method.scope,
                settings=self._config.train,
            )
            result = self._trainer.step(batch.packed, fused)
            correction = fused.correction
        gap, attributed = self._attribute(batch, fused.gap.logp_target, version, phases)
        return gap, correction, result, attributed

    def _attribute(
        self, batch: StepBatch, target: Tensor, version: int, phases: _Phases
    ) -> tuple[PolicyGap, dict[str, Metric]]:
        """The gap with its parts, and their metrics; `target` is of the version."""
        with phases("attribute"):
            scores = version_scores(batch, target, version, self._trainer, self._config)
            gap = batch.gap(target, scores.own, version, scores.cached)
            return gap, attribution_metrics(gap, scores)

    def _on_grid(self, batch: PackedBatch, name: str) -> Tensor:
        """[N] log-probs of the current weights on the grid of a quantisation."""
        return quantized_logprobs(
            self._trainer.model,
            batch,
            scheme(name),
            temperature=self._config.engine.temperature,
            microbatch_tokens=self._config.train.microbatch_tokens,
        )

    def _discarded(self, discarded: Sequence[Discarded]) -> list[EpisodeRow]:
        rows = []
        for item in discarded:
            rows.append(EpisodeRow(episode=self._store.get(item.episode), reason=item.reason))
            self._store.discard(item.episode)
        return rows

    def _write(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        write_step(self._run, step, rows)


_Learned = tuple[PolicyGap, Correction, StepResult, dict[str, Metric]]
"""The gap, its correction, what the update did, and the metrics of attribution."""


class _Phases:
    """Seconds spent in each named part; a part within another is not counted in both."""

    def __init__(self) -> None:
        self.t0 = time.monotonic()
        self.seconds: dict[str, float] = {}
        self._within = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start, outer, self._within = time.monotonic(), self._within, 0.0
        yield
        spent = time.monotonic() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + spent - self._within
        self._within = outer + spent


def _rows(
    batch: StepBatch, gap: PolicyGap, correction: Correction, trainer_version: int
) -> list[EpisodeRow]:
    """One row per episode with what the step computed for its tokens."""
    in_queue = (trainer_version - batch.finished_version)[gap.episode]
    columns: dict[str, Tensor | None] = {
        "logp_target": gap.logp_target,
        "logp_version": gap.logp_version,
        "advantage": correction.advantages,
        "weight": correction.weight,
        "keep": correction.keep,
        "lag_in_flight": gap.lag - in_queue,
        "lag_in_queue": in_queue,
    }
    arrays: dict[str, Any] = {
        name: None if value is None else value.numpy() for name, value in columns.items()
    }
    counts = torch.zeros(gap.num_episodes, dtype=torch.int64)
    counts.index_add_(0, gap.segment_episode, gap.segment_offsets.diff())
    stops = counts.cumsum(0).tolist()
    starts = [0, *stops[:-1]]
    return [
        EpisodeRow(
            episode=episode,
            **{
                name: None if array is None else array[start:stop] for name, array in arrays.items()
            },
        )
        for episode, start, stop in zip(batch.episodes, starts, stops, strict=True)
    ]


def _value(name: str, metric: Metric, sketch: bytes | None) -> MetricValue:
    return MetricValue(
        name=METRICS[name].name,
        sum=metric.sum,
        count=metric.count,
        min=metric.min,
        max=metric.max,
        sketch=sketch,
    )
