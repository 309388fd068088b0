import asyncio
import math
from array import array
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.embedded import VOCABULARY, tiny
from support.episodes import episode, segment, span
from trueup import config
from trueup.diagnostics.sketch import QuantileSketch
from trueup.errors import DataError
from trueup.records.directory import RunDirectory
from trueup.records.tokens import read_step
from trueup.training.learner import Learner
from trueup.training.messages import Consumed, Discarded, StepReport
from trueup.training.payload import PayloadStore
from trueup.training.step_batch import StepBatch
from trueup.training.trainer import TorchTrainer
from trueup.types import Episode, WeightManifest

FAST = ("train.minibatches=1", "train.lr=1e-2", "correction.preset=tis")


@dataclass
class Rig:
    root: Path
    overrides: tuple[str, ...] = ()
    keep_versions: int = 3
    num_changed: int | None = None
    published: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings = config.load("", (*FAST, *self.overrides))
        self.run = RunDirectory.create(self.root, "run")
        self.store = PayloadStore(self.run.path)
        self.trainer = TorchTrainer(
            tiny(), settings.train, temperature=1.0, seed=0, keep_versions=self.keep_versions
        )
        self.learner = Learner(
            settings,
            self.run,
            self.trainer,
            self.store,
            publish=self._publish,
            retire=lambda version: None,
            close=lambda: None,
            tokenizer_files_from=self.root,
        )

    def _publish(self, version: int, tensors: Any) -> WeightManifest:
        self.published.append(version)
        return WeightManifest(
            version=version,
            transport="none",
            location="",
            digest="d",
            tensors=(),
            nbytes=0,
            n_changed=len(tensors) if self.num_changed is None else self.num_changed,
        )

    def update(
        self, *episodes: Episode, step: int = 0, finished: int = 0, left: tuple[Episode, ...] = ()
    ) -> StepReport:
        for each in (*episodes, *left):
            self.store.put(each)
        consumed = [Consumed(episode=e.id, finished_version=finished) for e in episodes]
        discarded = [Discarded(episode=e.id, reason="stale") for e in left]
        return asyncio.run(self.learner.update(step, consumed, discarded))

    def rows(self, step: int = 0) -> dict[str, dict[str, Any]]:
        return {row["episode"]: row for row in read_step(self.run, step).to_pylist()}


def sampled(name: str, *, version: int = 0, reward: float = 1.0, **changes: Any) -> Episode:
    """Three action tokens that nobody sampled, of one version."""
    ids = [(sum(map(ord, name)) * (i + 3)) % VOCABULARY for i in range(5)]
    whole = segment(
        ids, [0, 0, 1, 1, 1], logps=[-3.5, -3.75, -4.0], spans=[span(0, 3, version=version)]
    )
    return episode(name, whole, reward=reward, **changes)


def pair(tag: str, version: int = 0) -> tuple[Episode, Episode]:
    """A group with contrast."""
    return sampled(f"{tag}0", version=version, reward=0.0), sampled(f"{tag}1", version=version)


def metric(report: StepReport, name: str) -> Any:
    found = next(value for value in report.metrics if value.name == name)
    return SimpleNamespace(
        **{f.name: getattr(found, f.name) for f in fields(found)}, mean=found.sum / found.count
    )


def test_a_step_trains_publishes_and_records_every_token(tmp_path: Path):
    rig = Rig(tmp_path)
    batch = pair("a")
    report = rig.update(*batch)
    assert (report.step, report.version, report.tokens) == (0, 1, 6)
    assert report.manifest is not None
    assert rig.published == [1]
    assert report.episodes == ("a0", "a1")
    assert metric(report, "episode/reward").sum == 1.0
    assert report.t0 <= report.t_publish[0] <= report.t_publish[1] <= report.t1
    rows = rig.rows()
    for each in batch:
        row = rows[each.id]
        assert row["reason"] is None
        assert array("i", row["token_ids"]) == each.segments[0].token_ids
        assert array("f", row["logp_behaviour"]) == each.segments[0].logp_behaviour
        for name in ("logp_target", "logp_version", "advantage", "weight", "keep"):
            assert len(row[name]) == 3
        assert all(math.isfinite(x) for x in row["logp_target"])
    assert rows["a0"]["advantage"][0] < 0 < rows["a1"]["advantage"][0]


def test_the_lag_is_split_into_flight_and_queue(tmp_path: Path):
    """V4: sampled at v0, finished at v2, consumed at v3."""
    rig = Rig(tmp_path)
    for step in range(3):
        rig.update(*pair(f"warm{step}", version=step), step=step, finished=step)
    assert rig.trainer.version == 3
    rig.update(*pair("old"), step=3, finished=2)
    rig.update(*pair("waited", version=0), step=4, finished=0)
    old, waited = rig.rows(3)["old0"], rig.rows(4)["waited0"]
    assert (old["lag_in_flight"], old["lag_in_queue"]) == ([2, 2, 2], [1, 1, 1])
    assert (waited["lag_in_flight"], waited["lag_in_queue"]) == ([0, 0, 0], [4, 4, 4])


def test_the_gap_is_split_by_the_score_of_the_version_that_sampled(tmp_path: Path):
    rig = Rig(tmp_path)
    batch = pair("a")
    rig.update(*batch, step=0)
    first = rig.rows(0)
    # of version 0 still: what version 0 said of the same tokens in step 0
    rig.update(*batch, step=1, finished=0)
    second = rig.rows(1)
    for name in ("a0", "a1"):
        assert first[name]["logp_version"] == first[name]["logp_target"]
        assert second[name]["logp_version"] == first[name]["logp_target"]
        assert second[name]["logp_target"] != second[name]["logp_version"]


def test_staleness_alone_is_corrected_by_the_ratio_to_the_version_that_sampled(tmp_path: Path):
    # Engine and trainer disagree by nats here; the cap and the filter bind on staleness alone.
    rig = Rig(
        tmp_path,
        ("correction.on=staleness", "correction.preset=is", "correction.filters.k1-token.high=1.5"),
    )
    batch = pair("a")
    rig.update(*batch, step=0)
    assert rig.rows(0)["a0"]["weight"] == [1, 1, 1]  # fresh: nothing is stale
    rig.update(*batch, step=1)
    for row in rig.rows(1).values():
        stale = [t - v for t, v in zip(row["logp_target"], row["logp_version"], strict=True)]
        kept = [math.log(0.5) <= d <= math.log(1.5) for d in stale]
        expected = [math.exp(d) if k else 0 for d, k in zip(stale, kept, strict=True)]
        assert row["keep"] == kept
        assert row["weight"] == pytest.approx(expected, rel=1e-5)


def test_each_token_of_an_episode_of_three_versions_is_scored_by_its_own(tmp_path: Path):
    rig = Rig(tmp_path)
    batch = pair("a")
    for step in range(2):
        rig.update(*batch, step=step, finished=step)
    spans = tuple(span(version, version + 1, version=version) for version in range(3))
    split = [replace(e, segments=(replace(e.segments[0], spans=spans),), group=1) for e in batch]
    rig.update(*pair("new", version=2), *split, step=2, finished=2)
    targets = [rig.rows(step)["a0"]["logp_target"] for step in range(3)]
    row = rig.rows(2)["a0"]
    assert row["logp_version"] == [targets[version][version] for version in range(3)]
    assert len({target[0] for target in targets}) == 3
    assert row["lag_in_flight"] == [2, 1, 0]
    assert rig.rows(2)["new0"]["logp_version"] == rig.rows(2)["new0"]["logp_target"]


def test_a_version_that_is_not_kept_any_more_is_not_scored(tmp_path: Path):
    rig = Rig(tmp_path, keep_versions=1)
    for step in range(2):
        rig.update(*pair(f"warm{step}", version=step), step=step, finished=step)
    report = rig.update(*pair("old", version=0), step=2, finished=0)
    assert all(math.isnan(x) for x in rig.rows(2)["old0"]["logp_version"])
    assert metric(report, "gap/scored").sum == 0


def names(report: StepReport) -> set[str]:
    return {value.name for value in report.metrics}


def test_the_versions_labels_are_tested_while_the_version_before_is_kept(tmp_path: Path):
    rig = Rig(tmp_path, ("attribution.label_test=1.0",))
    first = rig.update(*pair("a"))
    assert "label/slope" not in names(first)  # there is no version -1
    rig.update(*pair("b", version=1), step=1, finished=1)
    second = rig.update(*pair("c", version=2), step=2, finished=2)
    assert metric(second, "label/se").mean > 0
    assert math.isfinite(metric(second, "label/slope").mean)


def test_labels_that_lie_fail_their_verdict(tmp_path: Path):
    """The behaviour log-probs are exactly those of version 1, whatever the label says."""
    rig = Rig(tmp_path, ("attribution.label_test=1.0",))
    for step in range(2):
        rig.update(*pair(f"warm{step}", version=step), step=step, finished=step)
    for step, (label, slope) in enumerate(((1, 0.0), (2, 1.0)), start=2):
        batch = [sampled(f"{step}-{i}", version=label, reward=i % 2) for i in range(8)]
        packed = StepBatch.collect(batch, [1] * 8).packed
        logps = rig.trainer.score(packed, 1).reshape(8, 3)
        batch = [
            replace(e, segments=(replace(e.segments[0], logp_behaviour=array("f", row.tolist())),))
            for e, row in zip(batch, logps, strict=True)
        ]
        report = rig.update(*batch, step=step, finished=label)
        assert metric(report, "label/slope").mean == pytest.approx(slope, abs=1e-3)
        assert metric(report, "health/labels").sum == slope


def test_a_score_is_repeated_in_other_micro_batches_for_its_noise(tmp_path: Path):
    rig = Rig(tmp_path, ("attribution.repeat=1.0",))
    report = rig.update(*pair("a"))
    noise = metric(report, "attribution/scorer_variance")
    assert noise.count == 6
    assert 0 <= noise.max < 1e-10  # float32


def test_verdicts_and_the_distribution_of_the_gap_are_recorded(tmp_path: Path):
    rig = Rig(tmp_path)
    report = rig.update(*pair("a"))
    assert metric(report, "health/update_visible").sum == 0
    assert metric(report, "health/floor").sum == 1  # nobody sampled these log-probs
    size = metric(report, "gap/abs_log_ratio")
    sketch = QuantileSketch.from_bytes(size.sketch)
    assert (sketch.count, sketch.max) == (size.count, pytest.approx(size.max, rel=1e-6))
    assert metric(report, "gap/k3").sketch is None


def test_v08_a_mismatch_that_grows_at_learning_rate_0_is_a_stale_cache(tmp_path: Path):
    def mismatches(root: Path, growth: float) -> list[float]:
        root.mkdir()
        rig = Rig(root, ("train.lr=0", "schedule.staleness=2"))
        failed = []
        for step in range(8):
            batch = [sampled(f"{step}-{i}", version=step, reward=i % 2) for i in range(4)]
            packed = StepBatch.collect(batch, [step] * 4).packed
            true = rig.trainer.score(packed).reshape(4, 3)
            noise = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            served = (true - 0.01 * noise - growth * step).clamp(max=0)
            batch = [
                replace(
                    e, segments=(replace(e.segments[0], logp_behaviour=array("f", row.tolist())),)
                )
                for e, row in zip(batch, served, strict=True)
            ]
            report = rig.update(*batch, step=step, finished=step)
            assert not any(value.name == "health/update_visible" for value in report.metrics)
            failed.append(metric(report, "health/stationary").sum)
        return failed

    assert sum(mismatches(tmp_path / "sound", 0.0)) == 0
    grows = mismatches(tmp_path / "stale", 0.02)
    assert grows[:4] == [0, 0, 0, 0]  # too few steps to say
    assert grows[-1] == 1


def test_v10_an_update_that_no_weight_shows_fails_its_verdict(tmp_path: Path):
    rig = Rig(tmp_path)
    rig.num_changed = 0
    assert metric(rig.update(*pair("a")), "health/update_visible").sum == 1


def test_no_share_is_no_attribution(tmp_path: Path):
    rig = Rig(tmp_path, ("attribution.share=0.0",))
    report = rig.update(*pair("a"))
    assert rig.rows()["a0"]["logp_version"] is None
    assert not any(value.name == "gap/engine" for value in report.metrics)


def test_a_share_scores_that_part_of_the_episodes(tmp_path: Path):
    """200 episodes with probability 1/2: outside 60 ... 140 with a chance below 2e-8."""
    rig = Rig(tmp_path, ("attribution.share=0.5",))
    batch = [e for i in range(100) for e in pair(f"{i}-")]
    report = rig.update(*(replace(e, group=i // 2) for i, e in enumerate(batch)))
    rows = rig.rows().values()
    scored = [not math.isnan(row["logp_version"][0]) for row in rows]
    assert 60 <= sum(scored) <= 140
    assert metric(report, "gap/scored").sum == 3 * sum(scored)


def test_a_batch_without_contrast_publishes_nothing_and_is_recorded(tmp_path: Path):
    rig = Rig(tmp_path)
    report = rig.update(sampled("a"), sampled("b"))
    assert (report.version, report.manifest, rig.published) == (0, None, [])
    assert report.episodes == ("a", "b")
    assert rig.rows()["a"]["keep"] == [False] * 3


def test_tokens_beyond_the_bound_are_masked_where_the_policy_says_so(tmp_path: Path):
    rig = Rig(tmp_path, ("schedule.consume=mask", "schedule.staleness=1"))
    for step in range(2):
        rig.update(*pair(f"warm{step}", version=step), step=step, finished=step)
    old = [replace(e, group=1) for e in pair("old", version=0)]
    rig.update(*pair("new", version=1), *old, step=2, finished=2)
    rows = rig.rows(2)
    assert rows["old0"]["keep"] == [False] * 3
    assert rows["new0"]["keep"] == [True] * 3


def test_discarded_episodes_are_recorded_with_their_reason_and_never_trained(tmp_path: Path):
    rig = Rig(tmp_path)
    failed = episode("failed", reward=None)
    report = rig.update(*pair("a"), left=(sampled("late"), failed))
    assert report.episodes == ("a0", "a1")
    rows = rig.rows()
    assert rows["late"]["reason"] == rows["failed"]["reason"] == "stale"
    assert rows["late"]["weight"] is None
    assert rows["failed"]["reward"] is None


def test_what_is_recorded_is_gone_from_the_payload_store(tmp_path: Path):
    rig = Rig(tmp_path)
    rig.update(*pair("a"), left=(sampled("late"),))
    for name in ("a0", "a1", "late"):
        with pytest.raises(DataError):
            rig.store.get(name)


def test_what_is_left_over_is_recorded_as_a_step_of_its_own(tmp_path: Path):
    rig = Rig(tmp_path)
    rig.store.put(sampled("a"))
    asyncio.run(rig.learner.record(7, [Discarded(episode="a", reason="run_end")]))
    assert rig.rows(7)["a"]["reason"] == "run_end"


def test_a_broken_episode_stops_the_step_before_anything_is_trained(tmp_path: Path):
    """C13"""
    rig = Rig(tmp_path)
    good, bad = pair("a")
    short = replace(bad.segments[0], logp_behaviour=array("f", [-1.0]))
    before = {name: tensor.clone() for name, tensor in rig.trainer.export().items()}
    with pytest.raises(DataError, match="episode a1 must be one log-prob"):
        rig.update(good, replace(bad, segments=(short,)))
    assert rig.trainer.version == 0
    assert all(torch.equal(t, before[name]) for name, t in rig.trainer.export().items())
    assert rig.store.get("a0") == good


def test_checkpoints_hold_the_version_and_only_the_newest_are_kept(tmp_path: Path):
    rig = Rig(tmp_path, ("checkpoint.keep=2",))
    rig.update(*pair("a"))
    for step in (1, 2, 3):
        path, digest = asyncio.run(rig.learner.checkpoint(step, {"step": step, "stream": {}}))
        assert path == f"checkpoints/step-{step:06d}"
        assert len(digest) == 64
    assert sorted(p.name for p in rig.run.checkpoints.iterdir()) == ["step-000002", "step-000003"]
    state = (rig.run.checkpoint(3) / "state.json").read_text()
    assert '"version": 1' in state


@pytest.mark.parametrize("attribution", ["attribution.share=1.0", "attribution.share=0.0"])
def test_a_fused_step_records_what_a_scored_one_does(tmp_path: Path, attribution: str):
    """Two steps, the second of which holds tokens of both versions."""
    rows, reports = {}, {}
    for fused in ("true", "false"):
        rig = Rig(tmp_path / fused, (f"train.fused={fused}", attribution, "train.lr=1e-4"))
        rig.update(*pair("a"))
        reports[fused] = rig.update(*pair("a"), *pair("new", version=1), step=1, finished=1)
        rows[fused] = rig.rows(1)
    assert "score" in reports["false"].phases
    assert "score" not in reports["true"].phases
    for phase in ("attribute", "correct", "train"):
        assert reports["true"].phases[phase] > 0
    for name, row in rows["false"].items():
        for column, value in row.items():
            if column in ("logp_target", "logp_version", "advantage", "weight") and value:
                assert rows["true"][name][column] == pytest.approx(value, abs=1e-5), column
            else:
                assert rows["true"][name][column] == value, column
    ours, theirs = ({v.name for v in reports[k].metrics} for k in ("true", "false"))
    assert ours == theirs


def test_phases_within_phases_are_counted_once(tmp_path: Path):
    rig = Rig(tmp_path)
    report = rig.update(*pair("a"))
    assert sum(report.phases.values()) <= report.t1 - report.t0


def test_the_gate_of_the_step_before_is_what_fuses_an_adaptive_correction(tmp_path: Path):
    rig = Rig(
        tmp_path,
        ("correction.preset=ais", "correction.gate=previous", "train.lr=1e-4"),
    )
    first = rig.update(*pair("a"))
    second = rig.update(*pair("b"), step=1)
    assert "score" in first.phases
    assert "score" not in second.phases
    own = metric(first, "adaptive/alpha").mean
    assert 0 < own <= 1
    for row in rig.rows(1).values():
        for target, behaviour, weight in zip(
            row["logp_target"], row["logp_behaviour"], row["weight"], strict=True
        ):
            ratio = min(math.exp(target - behaviour), 5.0)
            assert weight == pytest.approx(1 + own * (ratio - 1), rel=1e-4)
    assert metric(second, "gate/error").count == 6
    assert not any(value.name == "gate/error" for value in first.metrics)
