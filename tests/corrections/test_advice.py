"""Three step batches whose best correction is known, because their gradient is.

One token per episode, drawn from a softmax over V actions with logits z = 2·N(0,1) and rewards
N(0,1): the policy gradient with respect to the logits is π⊙(r − E r), exactly, so presets are
judged by the squared error of the gradient that they estimate from the tokens that are advised on.
"""

from functools import cache
from math import log

import pytest
import torch

from support.gaps import make_gap, ratio_gap
from trueup.corrections.advice import Recommendation, facts, recommend
from trueup.corrections.compose import correct
from trueup.corrections.whatif import whatif
from trueup.diagnostics.calibration import calibration
from trueup.gap import PolicyGap

V = 20
COMPARED = ("none", "tis", "mis", "ais")


class Bandit:
    """The problem, and ways in which its sampler may differ from it."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.logits, self.reward = 2 * self.normal(V), self.normal(V)
        self.target = self.logits.log_softmax(-1)
        self.pi = self.target.exp()
        self.gradient = self.pi * (self.reward - (self.pi * self.reward).sum())
        self.other = (self.logits + self.normal(V)).log_softmax(-1)

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator)

    def draw(self, log_probs: torch.Tensor, size: int) -> torch.Tensor:
        return torch.multinomial(log_probs.exp(), size, replacement=True, generator=self.generator)

    def faithful(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The target itself is sampled; only the reported log-probs are noisy."""
        action = self.draw(self.target, size)
        return action, self.target[action] + 0.03 * self.normal(size)

    def drifted(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Another policy is sampled, and reported truly."""
        action = self.draw(self.other, size)
        return action, self.other[action]

    def damaged(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One token in twelve is any token, and reported as all but impossible."""
        action, reported = self.faithful(size)
        bad = torch.rand(size, generator=self.generator) < 1 / 12
        action = torch.where(bad, torch.randint(V, (size,), generator=self.generator), action)
        return action, reported.masked_fill(bad, -12.0)

    def gap(self, action: torch.Tensor, reported: torch.Tensor) -> PolicyGap:
        size = len(action)
        none = torch.zeros(size, dtype=torch.int64)
        return PolicyGap(
            logp_target=self.target[action],
            logp_behaviour=reported.clamp(max=0.0),
            segment_offsets=torch.arange(size + 1),
            segment_episode=torch.arange(size),
            group=none,
            reward=self.reward[action],
            version=none,
            lag=none,
            engine=none,
        )

    def estimate(self, gap: PolicyGap, action: torch.Tensor, preset: str) -> torch.Tensor:
        """[V] the gradient that the preset estimates."""
        found = correct(
            gap, preset=preset, advantage="group", zero_variance="keep", denominator="kept"
        )
        c = torch.where(found.keep, found.weight * found.advantages, 0.0)
        return (torch.zeros(V).index_add(0, action, c) - c.sum() * self.pi) / found.denominator


@cache
def trial(kind: str, size: int = 1024, repeats: int = 120):
    """Squared errors [repeats] by preset, and the advice on the first ten dumps."""
    torch.set_num_threads(1)
    bandit = Bandit()
    errors = {preset: [] for preset in COMPARED}
    advice: list[Recommendation] = []
    for repeat in range(repeats):
        action, reported = getattr(bandit, kind)(size)
        gap = bandit.gap(action, reported)
        for preset in COMPARED:
            difference = bandit.estimate(gap, action, preset) - bandit.gradient
            errors[preset].append(difference.square().sum() / bandit.gradient.square().sum())
        if repeat < 10:
            advice.append(recommend(facts([gap])))
    return {preset: torch.stack(values) for preset, values in errors.items()}, advice


def better_by(errors, best: str, other: str) -> float:
    """z of the paired difference of mean squared errors."""
    difference = errors[other] - errors[best]
    return float(difference.mean() / difference.std() * len(difference) ** 0.5)


def test_nothing_is_needed_where_only_the_report_is_noisy():
    _, advice = trial("faithful")
    assert {found.preset for found in advice} == {"none"}
    assert all(found.reason.startswith("mean |d| is 0.02") for found in advice)
    assert not any(found.fixes for found in advice)
    # The noise does not know what was sampled: with m₁ = E[w], m₂ = E[w²] and the second moment
    # M = E[A²‖s‖²], N tokens have the error (m₁ − 1)² ‖g‖² + (m₂ M − m₁² ‖g‖²)/N, least at w = 1.
    bandit = Bandit()
    action, reported = bandit.faithful(20_000)
    gap = bandit.gap(action, reported)
    score = torch.eye(V) - bandit.pi
    second = bandit.pi @ (
        (bandit.reward - bandit.pi @ bandit.reward).square() * score.square().sum(1)
    )
    square = bandit.gradient.square().sum()
    error = {}
    for preset in COMPARED:
        weight = correct(gap, preset=preset, zero_variance="keep").weight.double()
        first, moment = weight.mean(), weight.square().mean()
        error[preset] = (first - 1) ** 2 * square + (moment * second - first**2 * square) / 1024
    assert min(error, key=error.__getitem__) == "none"


def test_truncation_is_best_where_another_policy_sampled():
    errors, advice = trial("drifted")
    assert {found.preset for found in advice} == {"tis"}
    assert not any(found.fixes for found in advice)
    # z of paired differences; at 4 a false alarm has a chance of 3e-5 each.
    for other in ("none", "mis", "ais"):
        assert better_by(errors, "tis", other) > 4


def test_masking_is_best_where_single_tokens_are_damaged():
    errors, advice = trial("damaged")
    assert {found.preset for found in advice} == {"mis"}
    for other in ("none", "tis", "ais"):
        assert better_by(errors, "mis", other) > 4


def test_a_distance_that_leaves_little_of_the_sample_is_itself_to_be_repaired():
    found = recommend(facts([ratio_gap([[2.0], [-2.0], [-3.0], [-2.5]] * 4)]))
    assert found.preset == "tis"
    assert any("less than 30%: a few tokens carry a step" in fix for fix in found.fixes)


def test_what_no_weight_repairs_is_named_before_the_preset():
    placeholder = make_gap([[-0.01, -0.03]] * 8, [[0.0, 0.0]] * 8)
    fixes = recommend(facts([placeholder])).fixes
    assert any(fix.startswith("behaviour log-probs are all 0 (probability 1)") for fix in fixes)
    shifted = ratio_gap([[0.5, 0.49, 0.51]] * 8, rewards=[0.0, 1.0] * 4)
    (fix,) = recommend(facts([shifted, ratio_gap([[0.01, -0.01]] * 8)])).fixes
    assert fix.startswith("the mean ratio is not 1: wrong temperature")


def test_a_filter_that_rejects_by_length_or_by_reward_is_a_caution():
    short, long = [[0.0]] * 4, [[0.0, log(10), log(10), log(10)]] * 2
    gap = ratio_gap(short + long, rewards=[0.0] * 4 + [1.0] * 2)
    rows = whatif([gap], presets=["none", "mis"]).rows
    cautions = recommend(facts([gap]), rows).cautions
    assert cautions == (
        "kept of the tokens of the longest and of the shortest episodes: mis 25% and 100%",
        "kept of the tokens of rewarded and of other episodes: mis 25% and 100%",
    )


def test_a_mean_ratio_below_one_may_be_what_was_never_sampled():
    # Behaviour .6, .399, .001 and target .5, .4, .1: the third action has not been sampled.
    target, behaviour = (log(0.5), log(0.4)), (log(0.6), log(0.399))
    taken = [[0, 1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1, 1]] * 8
    gap = make_gap(*([[logs[a] for a in row] for row in taken] for logs in (target, behaviour)))
    found = recommend(facts([gap]))
    assert not found.fixes
    assert found.cautions[0].startswith("the mean ratio of a step batch is below 1 (z = -")


def test_noise_of_the_scorer_is_no_bug_however_many_tokens_show_it():
    noise = 0.05 * torch.randn(200, 800, generator=torch.Generator().manual_seed(0))
    gap = ratio_gap(noise.tolist())
    assert calibration(gap).z > 4
    found = recommend(facts([gap]))
    assert not found.fixes


def test_facts_are_worked_out_by_hand():
    gap = make_gap(
        [[-1.0, -1.0], [-1.0, -1.0]],
        [[-1.0, -1.5], [-1.0 - log(8), float("nan")]],
        lags=[[0, 2], [1, 1]],
        version_logps=[[-1.0, -1.2], [float("nan"), -1.0]],
    )
    found = facts([gap, gap])
    assert (found.steps, found.episodes, found.tokens, found.missing) == (2, 4, 6, 2)
    assert found.abs_mean == pytest.approx((0.5 + log(8)) / 3)
    assert found.abs_median == pytest.approx(0.5)
    assert found.abs_max == pytest.approx(log(8))
    assert found.outside == pytest.approx(1 / 3)
    assert found.outside_moment == pytest.approx(log(8) ** 2 / (log(8) ** 2 + 0.25))
    assert found.inside_abs_mean == pytest.approx(0.25)
    assert found.floor == pytest.approx((0.0 + 0.3) / 2)
    assert found.max_lag == 2
