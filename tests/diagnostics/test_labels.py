"""Weights that really moved, an engine that really computes in bfloat16, labels that may lie."""

import copy
from array import array
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from support.embedded import VOCABULARY, tiny
from support.gaps import make_gap
from trueup.diagnostics.labels import label_test
from trueup.diagnostics.mismatch import mismatch
from trueup.gap import PolicyGap
from trueup.models.logprobs import action_logprobs
from trueup.models.packed import PackedBatch

EPISODES, PROMPT, ACTIONS = 128, 4, 32


@dataclass
class Versions:
    """The weights before and after one optimiser step, and engines that serve them."""

    before: Any
    after: Any

    def served(self, share_before: float) -> tuple[Tensor, Tensor]:
        """Ids [E, L] and log μ [E, A] of episodes of which a share was sampled one version early.

        Every label says that the later version sampled them.
        """
        early = round(share_before * EPISODES)
        parts = [
            _sample(self.before, early, seed=1),
            _sample(self.after, EPISODES - early, seed=2),
        ]
        ids, logps = (torch.cat(column) for column in zip(*parts, strict=True))
        return ids, logps

    def gap(self, ids: Tensor, logps: Tensor) -> tuple[PolicyGap, Tensor]:
        """The gap of the later version, and log π_{v−1}, all in float32."""
        batch = PackedBatch.pack(
            [array("i", row) for row in ids.tolist()],
            [array("b", [0] * PROMPT + [1] * ACTIONS)] * len(ids),
        )
        with torch.no_grad():
            own, before = (action_logprobs(m, batch).logp for m in (self.after, self.before))
        rows = own.reshape(len(ids), ACTIONS).tolist()
        return make_gap(rows, logps.tolist(), version_logps=rows), before


@torch.no_grad()
def _sample(model: Any, episodes: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """What an engine in bfloat16 samples and says of it: ids [e, L], log μ [e, A]."""
    generator = torch.Generator().manual_seed(seed)
    engine = copy.deepcopy(model).to(torch.bfloat16)
    ids = torch.randint(VOCABULARY, (episodes, PROMPT), generator=generator)
    logps = []
    for _ in range(ACTIONS if episodes else 0):
        logp = engine(input_ids=ids).logits[:, -1].float().log_softmax(-1)
        token = torch.multinomial(logp.exp(), 1, generator=generator)
        ids = torch.cat([ids, token], 1)
        logps.append(logp.gather(1, token))
    if not episodes:
        return torch.zeros(0, PROMPT + ACTIONS, dtype=torch.int64), torch.zeros(0, ACTIONS)
    return ids, torch.cat(logps, 1)


@cache
def versions(lr: float = 2e-5) -> Versions:
    """One Adam step at a small learning rate, as a policy takes them."""
    before = tiny(seed=1)
    after = copy.deepcopy(before)
    ids, _ = _sample(before, 32, seed=0)
    optimizer = torch.optim.Adam(after.parameters(), lr=lr)
    loss = torch.nn.functional.cross_entropy(
        after(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )
    loss.backward()
    optimizer.step()
    return Versions(before=before, after=after)


def measured(share_before: float, lr: float = 2e-5) -> Any:
    weights = versions(lr)
    gap, before = weights.gap(*weights.served(share_before))
    return gap, label_test(gap, logp_before=before)


# Sampling is seeded. Over seeds of this model the slopes scatter by .2 about the share.


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.0, "labels are true"),
        (1.0, "labels are false: the engine served the version before"),
        (0.5, "of the tokens: sampled one version earlier"),
    ],
)
def test_the_slope_is_the_mislabelled_share(share, words):
    _, found = measured(share)
    assert found.tokens == EPISODES * ACTIONS
    assert found.episodes == EPISODES
    assert 0 < found.standard_error < 0.12
    # Rounded weights add an error that no standard error of tokens holds (see the module).
    assert abs(found.slope - share) < 0.3
    assert words in found.verdict
    assert found.refuted == (share > 0)


def test_mean_size_of_the_gap_cannot_see_what_the_slope_sees():
    (true_gap, true), (false_gap, false) = measured(0.0), measured(1.0)
    sizes = [
        gap.log_ratio.abs().reshape(EPISODES, ACTIONS).mean(1) for gap in (true_gap, false_gap)
    ]
    errors = [float(size.std() / EPISODES**0.5) for size in sizes]
    apart = abs(mismatch(true_gap).abs_mean - mismatch(false_gap).abs_mean)
    assert apart < 2 * (errors[0] ** 2 + errors[1] ** 2) ** 0.5
    slopes = abs(true.slope - false.slope)
    assert slopes > 7 * (true.standard_error**2 + false.standard_error**2) ** 0.5


def test_an_update_that_is_larger_is_seen_with_less_error():
    assert measured(0.0, lr=3e-4)[1].standard_error < measured(0.0)[1].standard_error / 3


def test_the_slope_and_its_clustered_error_worked_out_by_hand():
    # x = log π_before − log π_own = .1, −.1 | .2, −.2, y = log μ − log π_own = .1, 0 | .1, −.2.
    # Means 0 and 0; slope = (.01 + .02 + .04)/.1 = .7; residuals .03, .07 | −.04, −.06;
    # x·residual: .003 − .007 = −.004 and −.008 + .012 = .004; error = √(2·.000032)/.1 = .08.
    own = [[-1.0, -1.0], [-1.0, -1.0]]
    gap = make_gap(own, [[-0.9, -1.0], [-0.9, -1.2]], version_logps=own)
    found = label_test(gap, logp_before=torch.tensor([-0.9, -1.1, -0.8, -1.2]))
    assert found.slope == pytest.approx(0.7, abs=1e-5)
    assert found.standard_error == pytest.approx(0.08, abs=1e-5)
    assert found.update == pytest.approx((0.1 / 4) ** 0.5, abs=1e-6)


def test_a_constant_error_of_the_engine_is_not_a_label():
    own = [[-1.0, -1.5], [-1.0, -2.0]]
    shifted = [[x - 0.3 for x in row] for row in own]
    gap = make_gap(own, shifted, version_logps=own)
    found = label_test(gap, logp_before=torch.tensor([-1.1, -1.4, -0.8, -2.2]))
    assert found.slope == pytest.approx(0.0, abs=1e-6)


NAN = float("nan")


@pytest.mark.parametrize(
    ("version", "before"),
    [
        (None, [-1.1, -2.1]),
        ([[NAN], [NAN]], [-1.1, -2.1]),
        ([[-1.0], [-2.0]], [NAN, NAN]),
        ([[-1.0], [-2.0]], [-1.1, NAN]),
        ([[-1.0], [-2.0]], [-1.0, -2.0]),
    ],
)
def test_what_cannot_be_decided_is_said_so(version, before):
    gap = make_gap([[-1.0], [-2.0]], [[-1.2], [-2.1]], version_logps=version)
    found = label_test(gap, logp_before=torch.tensor(before))
    assert not found.decided
    assert not found.refuted
    assert found.verdict.startswith("undecided")
