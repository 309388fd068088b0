import math
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from support.embedded import VOCABULARY, copied, reference_logps, tiny
from support.episodes import episode, segment
from trueup.config import TrainConfig
from trueup.corrections.base import Correction
from trueup.corrections.compose import correct
from trueup.gap import PolicyGap
from trueup.models.packed import PackedBatch
from trueup.training.corrected import Scored
from trueup.training.step_batch import StepBatch
from trueup.training.trainer import StepResult, TorchTrainer
from trueup.types import Episode


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trainer(
    *,
    dtype: str = "float32",
    arithmetic: str = "float32",
    temperature: float = 1.0,
    seed: int = 0,
    keep: int = 1,
    **train: Any,
) -> TorchTrainer:
    settings = TrainConfig(**{"minibatches": 1, "lr": 1e-2, "dtype": arithmetic, **train})
    return TorchTrainer(
        tiny(dtype=dtype), settings, temperature=temperature, seed=seed, keep_versions=keep
    )


def episodes(count: int = 8, *, rewards: tuple[float, ...] = (1.0, 0.0)) -> list[Episode]:
    """Groups of four episodes of 2 to 12 tokens, sampled by nobody."""
    chance = random.Random(count)
    found = []
    for i in range(count):
        ids = [chance.randrange(VOCABULARY) for _ in range(chance.randint(2, 12))]
        action = [0, *(int(chance.random() < 0.7) for _ in ids[2:]), 1]
        whole = segment(ids, action)
        found.append(episode(f"e{i}", whole, group=i // 4, reward=rewards[i % len(rewards)]))
    return found


@dataclass
class Lesson:
    """A step batch with its gap and correction, as a learner would prepare it."""

    batch: PackedBatch
    gap: PolicyGap
    correction: Correction

    def teach(self, pupil: TorchTrainer) -> StepResult:
        scored = Scored(self.gap, self.correction, pupil.settings)
        return pupil.step(self.batch, scored)


def prepare(
    pupil: TorchTrainer, graded: list[Episode] | None = None, *, noise: float = 0.1
) -> Lesson:
    """Behaviour log-probs are the trainer's own with noise on them."""
    batch = StepBatch.collect(graded or episodes(), [0] * len(graded or episodes()))
    target = pupil.score(batch.packed)
    assert target is not None
    generator = torch.Generator().manual_seed(0)
    behaviour = target - noise * torch.rand(len(target), generator=generator)
    gap = replace(batch, logp_behaviour=behaviour).gap(target, None, pupil.version)
    return Lesson(batch.packed, gap, correct(gap, preset="tis"))


def largest_change(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    return max(float((after[name] - tensor).abs().max()) for name, tensor in before.items())


def test_the_size_of_micro_batches_does_not_change_the_step():
    # in float64, because Adam turns the rounding of a gradient near 0 into a step of size lr
    start = copied(tiny(dtype="float64"))
    results = []
    for tokens in (1, 17, 8192):
        pupil = trainer(dtype="float64", minibatches=2, microbatch_tokens=tokens)
        prepare(pupil).teach(pupil)
        results.append(copied(pupil.model))
    assert largest_change(start, results[0]) > 1e-3
    assert largest_change(results[0], results[1]) < 1e-6
    assert largest_change(results[0], results[2]) < 1e-6


def test_bfloat16_takes_nearly_the_same_step_and_keeps_weights_in_float32():
    start = copied(tiny())
    steps = []
    for dtype in ("float32", "bfloat16"):
        pupil = trainer(dtype="float32", arithmetic=dtype, optimizer="adamw", lr=1e-3)
        prepare(pupil).teach(pupil)
        after = copied(pupil.model)
        assert {tensor.dtype for tensor in after.values()} == {torch.float32}
        steps.append(torch.cat([(after[name] - start[name]).flatten() for name in start]))
    assert 0.9 < torch.cosine_similarity(*steps, dim=0) < 1


def test_without_versions_to_keep_nothing_is_copied_and_none_can_be_scored():
    pupil = trainer(keep=0)
    lesson = prepare(pupil)
    assert lesson.teach(pupil).updates == 1
    assert pupil.score(lesson.batch, 0) is None


def test_kept_versions_take_turns_in_the_memory_of_as_many_copies():
    pupil = trainer(keep=2)
    targets, memory = [], set()
    for version in range(5):
        lesson = prepare(pupil)
        targets.append(lesson.gap.logp_target)
        lesson.teach(pupil)
        memory |= {tensors["lm_head.weight"].data_ptr() for tensors in pupil._earlier.values()}
        kept = [v for v in range(version + 1) if pupil.score(lesson.batch, v) is not None]
        assert kept == list(range(version + 1))[-2:]
        for v in kept:
            assert torch.equal(pupil.score(lesson.batch, v), targets[v])
    assert len(memory) == 2


def test_scoring_an_earlier_version_leaves_the_current_one_in_place():
    pupil = trainer(keep=1)
    lesson = prepare(pupil)
    lesson.teach(pupil)
    places = {name: tensor.data_ptr() for name, tensor in pupil.export().items()}
    now = pupil.score(lesson.batch)
    earlier = pupil.score(lesson.batch, 0)
    assert earlier is not None
    assert torch.equal(earlier, lesson.gap.logp_target)
    assert torch.equal(pupil.score(lesson.batch), now)
    assert {name: tensor.data_ptr() for name, tensor in pupil.export().items()} == places


def test_a_step_makes_what_was_good_likelier_and_what_was_bad_less_likely():
    pupil = trainer(lr=1e-3)
    lesson = prepare(pupil)
    result = lesson.teach(pupil)
    after = pupil.score(lesson.batch)
    assert after is not None
    good = lesson.correction.advantages > 0
    change = after - lesson.gap.logp_target
    assert change[good].sum() > 0 > change[~good].sum()
    assert (result.updates, pupil.version) == (1, 1)


def test_the_gradient_is_that_of_the_formula():
    """One token kept, r = 1: the gradient is -(w A / Z) ∇ log π of that token."""
    pupil = trainer(temperature=0.7, grad_clip=1e9)
    lesson = prepare(pupil)
    only = torch.zeros_like(lesson.correction.keep)
    only[3] = True
    five = torch.arange(len(only)) < 5
    changed = replace(lesson, correction=replace(lesson.correction, keep=only, counts=five))
    reference = trainer(temperature=0.7)
    ids = lesson.batch.token_ids
    position = int(lesson.batch.action_index[3])
    start = int(lesson.batch.offsets[lesson.batch.offsets <= position].max())
    logits = reference.model(input_ids=ids[None, start:position]).logits[0, -1] / 0.7
    weight = changed.correction.weight[3] * changed.correction.advantages[3] / 5.0
    assert weight != 0
    (-weight * logits.log_softmax(-1)[ids[position]]).backward()
    changed.teach(pupil)
    for (name, ours), theirs in zip(
        pupil.model.named_parameters(), reference.model.parameters(), strict=True
    ):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_batch_without_a_kept_token_changes_nothing(minibatches: int):
    pupil = trainer(minibatches=minibatches)
    before = copied(pupil.model)
    lesson = prepare(pupil, episodes(rewards=(1.0,)))
    assert not lesson.correction.keep.any()
    result = lesson.teach(pupil)
    assert (result.updates, pupil.version) == (0, 0)
    assert largest_change(before, copied(pupil.model)) == 0
    assert pupil.optimizer.state_dict()["state"] == {}
    assert result.metrics["update/skipped"].sum == 0


def with_infinite_weight(lesson: Lesson, token: int) -> Lesson:
    """The loss of one kept token overflows."""
    weight = lesson.correction.weight.clone()
    weight[token] = torch.inf
    return replace(lesson, correction=replace(lesson.correction, weight=weight))


def test_a_gradient_that_is_not_finite_is_no_step_and_is_counted():
    pupil = trainer()
    before = copied(pupil.model)
    result = with_infinite_weight(prepare(pupil), 0).teach(pupil)
    assert (result.updates, pupil.version) == (0, 0)
    assert result.metrics["update/skipped"].sum == 1
    assert "update/grad_norm" not in result.metrics
    assert largest_change(before, copied(pupil.model)) == 0


def test_a_mini_batch_that_is_not_finite_leaves_the_others_alone():
    pupil = trainer(minibatches=4)
    result = with_infinite_weight(prepare(pupil), 0).teach(pupil)
    assert (result.updates, pupil.version) == (3, 1)
    assert result.metrics["update/skipped"].sum == 1
    assert result.metrics["update/grad_norm"].count == 3
    assert all(bool(torch.isfinite(tensor).all()) for tensor in pupil.export().values())


def test_the_score_of_an_earlier_version_is_bit_for_bit_the_score_taken_then():
    pupil = trainer(keep=2)
    batch = prepare(pupil).batch
    taken = []
    for _ in range(4):
        score = pupil.score(batch)
        assert score is not None
        taken.append(score)
        prepare(pupil).teach(pupil)
    current = pupil.score(batch)
    assert current is not None
    weights = copied(pupil.model)
    for version in (3, 2):
        earlier = pupil.score(batch, version)
        assert earlier is not None
        assert torch.equal(earlier, taken[version])
        assert not torch.equal(earlier, current)
    assert pupil.score(batch, 1) is None
    assert pupil.score(batch, 0) is None
    assert pupil.score(batch, 5) is None
    again = pupil.score(batch, 4)
    assert again is not None
    assert torch.equal(again, current)
    assert largest_change(weights, copied(pupil.model)) == 0


def test_scoring_leaves_no_gradient_and_no_trace():
    pupil = trainer()
    score = pupil.score(prepare(pupil).batch)
    assert score is not None
    assert not score.requires_grad
    assert all(parameter.grad is None for parameter in pupil.model.parameters())


def test_over_mini_batches_the_ratio_to_the_start_moves_and_the_weight_stays():
    """C25: w = π_old/μ is that of the step batch, r = π_θ/π_old of the weights as they are."""
    results = {}
    for minibatches in (1, 2):
        pupil = trainer(minibatches=minibatches)
        lesson = prepare(pupil)
        weight = lesson.correction.weight.clone()
        target = lesson.gap.logp_target.clone()
        results[minibatches] = lesson.teach(pupil)
        assert torch.equal(lesson.correction.weight, weight)
        assert torch.equal(lesson.gap.logp_target, target)
        assert float((weight - 1).abs().max()) > 0.01
    still, moving = (results[m].metrics["update/log_ratio"] for m in (1, 2))
    assert max(abs(still.min), abs(still.max)) < 1e-5
    assert max(abs(moving.min), abs(moving.max)) > 1e-2
    assert still.count == moving.count
    assert [results[m].updates for m in (1, 2)] == [1, 2]


def test_a_mini_batch_counts_as_much_as_its_share_of_the_step_batch():
    """With steps too small to matter to each other, M mini-batches are M steps of the whole."""
    changes = []
    for minibatches in (1, 2, 4):
        pupil = trainer(dtype="float64", minibatches=minibatches, grad_clip=1e9)
        pupil.optimizer = torch.optim.SGD(pupil.model.parameters(), lr=1e-7)
        before = copied(pupil.model)
        prepare(pupil).teach(pupil)
        change = [(after - before[name]).flatten() for name, after in pupil.export().items()]
        changes.append(torch.cat(change) / minibatches)
    assert changes[0].norm() > 0
    for change in changes[1:]:
        assert (change - changes[0]).norm() < 1e-3 * changes[0].norm()


def test_the_order_of_episodes_is_fixed_by_seed_and_version():
    def trained(seed: int) -> dict[str, Tensor]:
        pupil = trainer(minibatches=2, seed=seed)
        prepare(pupil).teach(pupil)
        return dict(copied(pupil.model))

    largest = 2**63 - 1
    assert largest_change(trained(largest), trained(largest)) == 0
    assert largest_change(trained(3), trained(4)) > 0


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_log_probs_are_those_of_the_sampling_temperature(temperature: float):
    pupil = trainer(temperature=temperature)
    whole = segment([3, 5, 7, 9, 11], [0, 0, 1, 1, 1])
    score = pupil.score(PackedBatch.from_segments([whole]))
    assert score is not None
    expected = reference_logps(pupil.model, [3, 5], [7, 9, 11], temperature)
    torch.testing.assert_close(score.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_loss_is_taken_at_the_temperature_of_the_score():
    pupil = trainer(temperature=0.5)
    result = prepare(pupil).teach(pupil)
    ratio = result.metrics["update/log_ratio"]
    assert max(abs(ratio.min), abs(ratio.max)) < 1e-5


def test_a_learning_rate_of_zero_makes_versions_of_equal_weights():
    pupil = trainer(lr=0.0, minibatches=2)
    before = copied(pupil.model)
    result = prepare(pupil).teach(pupil)
    assert (result.updates, pupil.version) == (2, 1)
    assert largest_change(before, copied(pupil.model)) == 0


def test_the_gradient_norm_is_bounded_and_the_recorded_one_is_the_raw_one():
    pupil = trainer(grad_clip=1e-3)
    pupil.optimizer = torch.optim.SGD(pupil.model.parameters(), lr=1.0)
    before = copied(pupil.model)
    result = prepare(pupil).teach(pupil)
    moved = torch.cat([(t - before[name]).flatten() for name, t in pupil.export().items()])
    assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-3)
    assert result.metrics["update/grad_norm"].max > 0.01


def test_an_episode_without_action_tokens_does_not_disturb_the_step():
    """C3: with micro-batches so small that one holds nothing but prompts."""
    prompts = [
        episode(f"p{i}", segment([1, 2, 3], [0, 0, 0]), group=i, reward=1.0) for i in range(2)
    ]
    results = []
    for extra in ([], prompts):
        pupil = trainer(dtype="float64", microbatch_tokens=4)
        lesson = prepare(pupil, sorted([*episodes(), *extra], key=lambda e: e.group))
        assert lesson.teach(pupil).updates == 1
        results.append(copied(pupil.model))
    assert largest_change(*results) < 1e-6


def test_missing_log_probs_take_no_part_and_harm_nothing():
    """C12"""
    pupil = trainer()
    lesson = prepare(pupil)
    behaviour = lesson.gap.logp_behaviour.clone()
    behaviour[::3] = torch.nan
    gap = replace(lesson.gap, logp_behaviour=behaviour)
    correction = correct(gap, preset="tis")
    assert not correction.keep[::3].any()
    result = Lesson(lesson.batch, gap, correction).teach(pupil)
    assert result.updates == 1
    assert all(bool(torch.isfinite(tensor).all()) for tensor in pupil.export().values())
    assert result.metrics["update/log_ratio"].count == int(correction.keep.sum())


def test_the_export_is_every_tensor_of_the_live_model():
    pupil = trainer()
    exported = pupil.export()
    assert exported.keys() == copied(pupil.model).keys()
    prepare(pupil).teach(pupil)
    assert largest_change(exported, copied(pupil.model)) == 0


def kl_step(pupil: TorchTrainer) -> tuple[StepResult, dict[str, Tensor]]:
    result = prepare(pupil).teach(pupil)
    return result, dict(copied(pupil.model))


def test_the_reference_is_the_policy_that_training_started_from():
    pupil = trainer(kl_beta=0.1)
    start = copied(pupil.model)
    first, _ = kl_step(pupil)
    second, _ = kl_step(pupil)
    assert pupil.reference is not None
    assert largest_change(start, dict(pupil.reference)) == 0
    assert first.metrics["update/reference_kl"].mean == pytest.approx(0, abs=1e-6)
    assert second.metrics["update/reference_kl"].mean > 1e-4
    assert "update/reference_kl" not in kl_step(trainer())[0].metrics
    assert trainer().reference is None


def test_a_given_reference_is_the_one_of_the_penalty():
    """After a resume the weights as they come in are not those that the run started from."""
    other = copied(tiny(seed=5))
    pupil = TorchTrainer(
        tiny(),
        TrainConfig(minibatches=1, kl_beta=0.1),
        temperature=1.0,
        seed=0,
        reference=other,
    )
    lesson = prepare(pupil)
    result = lesson.teach(pupil)
    model = tiny(seed=5)
    theirs = TorchTrainer(model, TrainConfig(), temperature=1.0, seed=0).score(lesson.batch)
    x = (theirs - lesson.gap.logp_target)[lesson.correction.keep].double()
    assert result.metrics["update/reference_kl"].mean == pytest.approx(
        float((x.exp() - 1 - x).mean()), rel=1e-3
    )


def test_the_penalty_pulls_towards_the_reference():
    far = copied(tiny(seed=5))
    distances = {}
    for beta in (0.0, 10.0):
        pupil = trainer(kl_beta=beta, lr=1e-3)
        pupil.reference = far if beta else None
        for _ in range(3):
            prepare(pupil).teach(pupil)
        distances[beta] = pupil.score(prepare(pupil).batch)
    batch = prepare(trainer()).batch
    goal = TorchTrainer(tiny(seed=5), TrainConfig(), temperature=1.0, seed=0).score(batch)
    assert goal is not None
    with_, without = ((goal - distances[beta]).abs().mean() for beta in (10.0, 0.0))
    assert with_ < without


def test_the_learning_rate_is_scaled_by_the_effective_size_where_asked_for():
    for scaled in (False, True):
        pupil = trainer(lr=1e-2, lr_ess=scaled)
        lesson = prepare(pupil, noise=2.0)
        size = lesson.correction.metrics["ess/applied_episodes"].mean
        assert size < 0.9
        rate = lesson.teach(pupil).metrics["update/learning_rate"].mean
        assert rate == pytest.approx(1e-2 * math.sqrt(size) if scaled else 1e-2)


@pytest.mark.parametrize("loss", ["gspo", "cispo"])
def test_the_loss_that_is_asked_for_is_the_one_that_is_trained(loss: str):
    """After a first mini-batch has moved r, the methods differ."""
    results = {}
    for name in ("ppo", loss):
        pupil = trainer(loss=name, minibatches=4)
        prepare(pupil).teach(pupil)
        results[name] = copied(pupil.model)
    assert largest_change(results["ppo"], results[loss]) > 1e-5


def test_dual_clip_reaches_the_loss():
    """Bypass with behaviour log-probs so low that every ratio is large: with A < 0 no gradient."""
    norms = {}
    for dual in (0.0, 3.0):
        pupil = trainer(mode="bypass", dual_clip=dual)
        lesson = prepare(pupil)
        gap = replace(lesson.gap, logp_behaviour=lesson.gap.logp_target - 3.0)
        correction = correct(gap, preset="none")
        good = correction.advantages > 0
        bad_only = replace(correction, keep=correction.keep & ~good)
        result = Lesson(lesson.batch, gap, bad_only).teach(pupil)
        norms[dual] = result.metrics["update/grad_norm"].max
    assert norms[0.0] > 1e-2
    assert norms[3.0] == 0


def test_in_bypass_mode_the_ratio_is_taken_to_the_behaviour():
    pupil = trainer(mode="bypass")
    lesson = prepare(pupil, noise=0.1)
    found = lesson.teach(pupil).metrics["update/log_ratio"]
    d = lesson.gap.log_ratio[lesson.correction.keep]
    assert found.mean == pytest.approx(float(d.mean()), abs=1e-5)


def gradient(lesson: Lesson, **train: Any) -> Tensor:
    pupil = trainer(dtype="float64", grad_clip=1e9, lr=0.0, **train)
    lesson.teach(pupil)
    return torch.cat([p.grad.flatten() for p in pupil.model.parameters()])


def test_the_mean_over_sequences_is_the_mean_of_the_steps_of_each_episode_alone():
    lesson = prepare(trainer(dtype="float64"))
    made, owner = lesson.correction, lesson.gap.episode
    alone = [
        gradient(
            replace(
                lesson,
                correction=replace(made, keep=made.keep & (owner == e), counts=owner == e),
            )
        )
        for e in range(lesson.gap.num_episodes)
    ]
    means = gradient(lesson, aggregation="sequence_mean")
    torch.testing.assert_close(means, torch.stack(alone).mean(0))
    sizes = torch.bincount(owner).double()
    sums = gradient(lesson, aggregation="sequence_sum", sequence_constant=3.0)
    expected = (torch.stack(alone) * sizes[:, None]).mean(0) / 3.0
    torch.testing.assert_close(sums, expected)
    assert (means - gradient(lesson)).abs().max() > 1e-4
