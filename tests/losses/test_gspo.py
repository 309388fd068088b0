import math

import pytest
import torch

from trueup.losses.gspo import sequence_logp
from trueup.losses.policy import policy_loss

OLD = [-1.0, -2.0, -0.5, -1.5, -3.0]
NEW = [-0.9, -2.3, -0.5, -1.0, -2.0]
SEQUENCE = [0, 0, 0, 1, 1]
LOG_S = [(0.1 - 0.3) / 3, (0.5 + 1.0) / 2]


def logp_of(keep=(True,) * 5, new=NEW):
    logp = torch.tensor(new, requires_grad=True)
    made = sequence_logp(
        logp,
        logp_old=torch.tensor(OLD),
        keep=torch.tensor(keep),
        sequence=torch.tensor(SEQUENCE),
    )
    return logp, made


def test_the_ratio_is_the_geometric_mean_of_its_sequence_by_hand():
    _, made = logp_of()
    log_ratio = made - torch.tensor(OLD)
    assert log_ratio.tolist() == pytest.approx([LOG_S[s] for s in SEQUENCE], abs=1e-6)


@pytest.mark.parametrize("bad", [9.0, math.nan, math.inf])
def test_a_token_that_is_not_kept_is_left_out_of_the_mean(bad):
    """C26: not a ratio of 1, and not of 1e-10."""
    logp, made = logp_of((True, False, True, True, True), [NEW[0], bad, *NEW[2:]])
    log_ratio = (made - torch.tensor(OLD))[[0, 2]]
    assert log_ratio.tolist() == pytest.approx([0.05, 0.05], abs=1e-6)
    made.sum().backward()
    assert logp.grad.tolist() == [1, 0, 1, 1, 1]


def test_the_gradient_is_that_of_the_sequence_form():
    """Σ over tokens of −s_t A / T against −s A with s = exp(mean log r), differentiated."""
    advantage = torch.tensor([1.0, -2.0])
    sequence = torch.tensor(SEQUENCE)
    size = torch.tensor([3.0, 2.0])
    logp, made = logp_of()
    terms = policy_loss(
        made,
        logp_old=torch.tensor(OLD),
        advantage=advantage[sequence],
        weight=torch.ones(5),
        keep=torch.ones(5, dtype=torch.bool),
        clip_low=0.9,
        clip_high=9.0,
    ).per_token
    ours = (terms / size[sequence]).sum()
    ours.backward()
    reference = torch.tensor(NEW, requires_grad=True)
    mean = torch.zeros(2).index_add(0, sequence, reference - torch.tensor(OLD)) / size
    theirs = (-mean.exp() * advantage).sum()
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    torch.testing.assert_close(logp.grad, reference.grad)


def test_a_sequence_of_one_token_has_the_token_s_ratio():
    logp = torch.tensor([-1.0, -2.0])
    made = sequence_logp(
        logp,
        logp_old=torch.tensor([-1.5, -1.0]),
        keep=torch.tensor([True, True]),
        sequence=torch.tensor([0, 1]),
    )
    torch.testing.assert_close(made, logp)
