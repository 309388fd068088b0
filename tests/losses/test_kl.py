import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trueup.losses.kl import reference_kl


def run(logp, reference, keep):
    return reference_kl(logp, logp_reference=reference, keep=torch.tensor(keep))


def test_values_and_gradient_by_hand():
    logp = torch.tensor([-1.0, -1.0, -2.0], requires_grad=True)
    reference = torch.tensor([-1.0, -1.0 + math.log(2), -2.0 - math.log(4)])
    found = run(logp, reference, [True] * 3)
    # x = 0, log 2, −log 4: e^x − 1 − x
    expected = [0, 2 - 1 - math.log(2), 0.25 - 1 + math.log(4)]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    found.sum().backward()
    assert logp.grad.tolist() == pytest.approx([0, -1.0, 0.75], abs=1e-6)  # 1 − e^x


@given(st.lists(st.floats(-15, 15, width=32), min_size=1, max_size=9))
def test_it_is_never_negative(x):
    found = run(torch.zeros(len(x)), torch.tensor(x), [True] * len(x))
    assert float(found.min()) >= -1e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_kept_reaches_neither_value_nor_gradient(bad):
    logp = torch.tensor([-1.0, bad], requires_grad=True)
    found = run(logp, torch.tensor([-2.0, bad]), [True, False])
    found.sum().backward()
    assert found[1] == logp.grad[1] == 0
    assert found.isfinite().all()


def test_its_expectation_under_the_policy_is_the_divergence():
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    found = run(p.log(), q.log(), [True] * 3)
    assert float((p * found).sum()) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-6)
