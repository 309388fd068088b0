import math

import pytest
import torch

from trueup.losses.cispo import cispo_loss


def run(ratios, advantage, weight=None, keep=None, low=1.0, high=5.0):
    n = len(ratios)
    logp = torch.tensor([math.log(r) for r in ratios], requires_grad=True)
    found = cispo_loss(
        logp,
        logp_old=torch.zeros(n),
        advantage=torch.tensor(advantage),
        weight=torch.ones(n) if weight is None else torch.tensor(weight),
        keep=torch.ones(n, dtype=torch.bool) if keep is None else torch.tensor(keep),
        clip_low=low,
        clip_high=high,
    )
    return logp, found


def test_the_gradient_is_the_clipped_ratio_times_the_advantage_by_hand():
    logp, found = run([2.0, 9.0, 0.01, 2.0], [1.0, 1.0, 3.0, -0.5], weight=[1.0, 1.0, 1.0, 3.0])
    found.per_token.sum().backward()
    # −w · min(r, 6) · A: −2, −6 (clipped, and still a gradient), −.03, 3
    assert logp.grad.tolist() == pytest.approx([-2.0, -6.0, -0.03, 3.0], abs=1e-5)
    assert found.clipped_high.tolist() == [False, True, False, False]
    assert found.clipped_low.tolist() == [False] * 4


def test_a_lower_bound_raises_small_ratios_where_it_is_asked_for():
    logp, found = run([0.01], [-1.0], low=0.2)
    found.per_token.sum().backward()
    assert logp.grad.tolist() == pytest.approx([0.8])
    assert found.clipped_low.tolist() == [True]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_kept_reaches_neither_loss_nor_gradient(bad):
    logp = torch.tensor([0.1, bad], requires_grad=True)
    found = cispo_loss(
        logp,
        logp_old=torch.tensor([0.0, bad]),
        advantage=torch.tensor([1.0, bad]),
        weight=torch.tensor([1.0, bad]),
        keep=torch.tensor([True, False]),
        clip_low=1.0,
        clip_high=5.0,
    )
    found.per_token.sum().backward()
    assert found.per_token[1] == logp.grad[1] == 0
    assert logp.grad[0] == pytest.approx(-math.exp(0.1))
