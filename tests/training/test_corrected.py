"""A correction is of the step batch: no split into micro-batches, forwards or ranks changes it."""

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from support.embedded import VOCABULARY, copied, tiny
from support.episodes import episode, segment
from trueup import config
from trueup.config import Config
from trueup.corrections.base import Correction
from trueup.corrections.table import PRESETS
from trueup.gap import PolicyGap
from trueup.losses.reduce import aggregation
from trueup.training.corrected import Corrected, Fused, Scored
from trueup.training.method import Method
from trueup.training.step_batch import StepBatch
from trueup.training.trainer import StepResult, TorchTrainer
from trueup.types import Episode

FUSING = [name for name, preset in PRESETS.items() if preset.scope != "batch"]
PRESET = pytest.mark.parametrize("preset", FUSING)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def settings(*overrides: str, **train: Any) -> Config:
    values = {"minibatches": 1, "lr": 1e-2, "grad_clip": 1e9, **train}
    return config.load(
        "", [*overrides, *(f"train.{name}={_toml(value)}" for name, value in values.items())]
    )


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def episodes(groups: int = 3) -> list[Episode]:
    """Groups of four: lengths 3 to 14, every third episode in two segments of two turns."""
    chance = random.Random(groups)
    found = []
    for i in range(4 * groups):
        parts = []
        for _ in range(1 + (i % 3 == 0)):
            ids = [chance.randrange(VOCABULARY) for _ in range(chance.randint(3, 14))]
            action = [0, *(int(chance.random() < 0.7) for _ in ids[2:]), 1]
            parts.append(segment(ids, action, turn=[j // 7 for j in range(len(ids))]))
        found.append(episode(f"e{i}", *parts, group=i // 4, reward=float(i % 4 in (1, 2))))
    return found


@dataclass
class Rig:
    """A trainer in float64, and a step batch whose behaviour is its own policy with noise on it."""

    config: Config
    noise: float = 0.3

    def __post_init__(self) -> None:
        self.trainer = TorchTrainer(
            tiny(dtype="float64"), self.config.train, temperature=1.0, seed=0
        )
        self.trainer.optimizer = torch.optim.SGD(self.trainer.model.parameters(), lr=1.0)
        graded = episodes()
        batch = StepBatch.collect(graded, [0] * len(graded))
        target = self.trainer.score(batch.packed)
        assert target is not None
        generator = torch.Generator().manual_seed(0)
        noise = self.noise * torch.randn(len(target), generator=generator)
        owner = batch.gap(target, None, 0).episode
        noise = torch.where(owner % 2 == 0, noise / 1000, noise)  # every method keeps some
        noise[owner == 1] = 9.0  # and rejects some
        behaviour = (target - noise).clamp(max=0)
        behaviour[5] = torch.nan
        self.batch = replace(batch, logp_behaviour=behaviour)
        self.target = target
        self.method = Method(self.config)

    def gap(self) -> PolicyGap:
        return self.batch.gap(self.target, None, 0)

    def scored(self) -> Scored:
        gap = self.gap()
        return Scored(gap, self.method(gap), self.config.train)

    def fused(self) -> Fused:
        return Fused(
            self.batch.gap(torch.zeros_like(self.target), None, 0),
            correct=self.method,
            correct_part=self.method.part,
            scope=self.method.scope,
            settings=self.config.train,
        )

    def step(self, corrected: Corrected) -> StepResult:
        return self.trainer.step(self.batch.packed, corrected)


@cache
def stepped(way: str, *overrides: str, **train: Any) -> tuple[dict[str, Tensor], Correction]:
    rig = Rig(settings(*overrides, **train))
    corrected = rig.fused() if way == "fused" else rig.scored()
    assert rig.step(corrected).updates == 1
    return dict(copied(rig.trainer.model)), corrected.correction


def assert_same(
    first: tuple[dict[str, Tensor], Correction], second: tuple[dict[str, Tensor], Correction]
) -> None:
    start = copied(tiny(dtype="float64"))
    for name, tensor in first[0].items():
        assert float((tensor - second[0][name]).abs().max()) < 1e-6, name
    assert max(float((t - start[name]).abs().max()) for name, t in first[0].items()) > 1e-3
    one, other = first[1], second[1]
    assert torch.equal(one.keep, other.keep)
    assert torch.equal(one.counts, other.counts)
    assert torch.equal(one.advantages, other.advantages)
    torch.testing.assert_close(one.weight, other.weight, rtol=1e-5, atol=1e-5)
    assert one.denominator == other.denominator
    assert one.metrics.keys() == other.metrics.keys()
    for name, metric in one.metrics.items():
        assert metric.sum == pytest.approx(other.metrics[name].sum, rel=1e-4, abs=1e-4), name


@PRESET
@pytest.mark.parametrize("tokens", [30, 8192])
def test_fused_and_scored_steps_are_the_same_step(preset: str, tokens: int) -> None:
    chosen = f"correction.preset={preset}"
    scored = stepped("scored", chosen)
    assert_same(scored, stepped("fused", chosen, microbatch_tokens=tokens))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_aggregation_and_denominator_are_those_of_the_step_batch(
    aggregation: str, denominator: str
) -> None:
    chosen = (
        "correction.preset=mis",
        "correction.params.high=1.2",
        f"correction.denominator={denominator}",
    )
    scored = stepped("scored", *chosen, aggregation=aggregation)
    assert not scored[1].keep.all()
    assert_same(scored, stepped("fused", *chosen, aggregation=aggregation, microbatch_tokens=20))


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "gspo"},
        {"loss": "cispo"},
        {"mode": "bypass"},
        {"kl_beta": 0.1},
        {"zero_variance": "keep"},
        {"lr_ess": True, "lr": 1.0},
    ],
    ids=str,
)
def test_every_option_of_the_loss_is_the_same_in_both(options: dict[str, Any]) -> None:
    preset = "mis" if "mode" in options else "tis"
    chosen = f"correction.preset={preset}"
    scored = stepped("scored", chosen, **options)
    assert_same(scored, stepped("fused", chosen, microbatch_tokens=20, **options))


@pytest.mark.parametrize("preset", PRESETS)
def test_the_size_of_micro_batches_changes_no_scored_step(preset: str) -> None:
    chosen = f"correction.preset={preset}"
    assert_same(stepped("scored", chosen), stepped("scored", chosen, microbatch_tokens=30))


@pytest.mark.parametrize(
    ("preset", "kind"),
    [*((name, "token_mean") for name in FUSING), ("tis", "sequence_mean"), ("geo", "sequence_sum")],
)
def test_two_ranks_with_half_the_groups_each_make_the_whole_step(preset: str, kind: str) -> None:
    """Each corrects what it holds; gradients times Z, and Z, are summed."""
    chosen, options = f"correction.preset={preset}", {"aggregation": kind, "lr": 0.0}
    whole = Rig(settings(chosen, **options))
    whole.step(whole.scored())
    total, size = None, 0.0
    for mine in ({0, 2}, {1}):
        rig = Rig(settings(chosen, **options))
        segments = torch.tensor(
            [s for s, e in enumerate(rig.batch.segment_episode.tolist()) if e // 4 in mine]
        )
        tokens = rig.batch.packed.actions_of(segments)
        gap = rig.gap().select(tokens)
        part = rig.method(gap)
        there = whole.method(whole.gap())
        assert torch.equal(part.weight, there.weight[tokens])
        assert torch.equal(part.keep, there.keep[tokens])
        assert torch.equal(part.advantages, there.advantages[tokens])
        # a rank packs its own segments only
        here = replace(
            gap,
            segment_offsets=rig.batch.packed.select(segments).action_offsets,
            segment_episode=gap.segment_episode[segments],
        )
        rig.trainer.step(rig.batch.packed.select(segments), Scored(here, part, rig.config.train))
        z = aggregation(
            rig.config.train.aggregation,
            counted=part.counts,
            episode=here.episode,
            num_episodes=here.num_episodes,
            constant=rig.config.train.sequence_constant,
        ).denominator
        size += z
        summed = [p.grad * z for p in rig.trainer.model.parameters()]
        total = summed if total is None else [a + b for a, b in zip(total, summed, strict=True)]
    assert total is not None
    for ours, parameter in zip(total, whole.trainer.model.parameters(), strict=True):
        torch.testing.assert_close(ours / size, parameter.grad, rtol=1e-5, atol=1e-7)


def test_a_micro_batch_holds_whole_units_of_the_scope() -> None:
    by_group = Rig(settings("correction.preset=geo")).fused().unit
    by_episode = Rig(settings("correction.preset=seq-tis")).fused().unit
    by_share = Rig(settings("correction.preset=tis", aggregation="sequence_mean")).fused().unit
    owner = Rig(settings()).batch.segment_episode
    assert by_group is not None
    assert by_episode is not None
    assert torch.equal(by_group, owner // 4)
    assert torch.equal(by_episode, owner)
    assert by_share is not None
    assert torch.equal(by_share, owner)
    assert Rig(settings("correction.preset=tis")).fused().unit is None


def test_what_was_recorded_of_a_fused_step_is_the_log_prob_before_it() -> None:
    rig = Rig(settings("correction.preset=tis", microbatch_tokens=20))
    fused = rig.fused()
    rig.step(fused)
    torch.testing.assert_close(fused.gap.logp_target, rig.target, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "fuses"),
    [
        ((), True),
        (("train.minibatches=2",), False),
        (("train.fused=false",), False),
        (("correction.preset=ais",), False),
        (("correction.preset=ais-episode",), True),
        (("correction.preset=m2po",), False),
        (("correction.normalize=true",), False),
        (("correction.off_below=0.01",), False),
        (("correction.on=staleness",), False),
        (("correction.filters.geo={}",), True),
        (("correction.denominator=kept",), True),
    ],
)
def test_what_needs_the_step_batch_first_is_scored(overrides: tuple[str, ...], fuses: bool) -> None:
    assert Method(config.load("", ["train.minibatches=1", *overrides])).fuses == fuses
