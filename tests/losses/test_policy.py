import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trueup.errors import DataError
from trueup.losses.policy import policy_loss
from trueup.losses.reduce import denominator, token_sum


def run(log_ratio, advantage, weight=None, keep=None, low=0.2, high=0.28):
    n = len(log_ratio)
    logp = torch.tensor(log_ratio, dtype=torch.float32, requires_grad=True)
    found = policy_loss(
        logp,
        logp_old=torch.zeros(n),
        advantage=torch.tensor(advantage, dtype=torch.float32),
        weight=torch.ones(n) if weight is None else torch.tensor(weight),
        keep=torch.ones(n, dtype=torch.bool) if keep is None else torch.tensor(keep),
        clip_low=low,
        clip_high=high,
    )
    return logp, found


def test_terms_clips_and_gradients_by_hand():
    ratios = [1.5, 1.5, 0.5, 0.5, 1.1]
    logp, found = run([math.log(r) for r in ratios], [2.0, -2.0, 2.0, -2.0, 1.0])
    # min(rA, clip(r)A): 2.56 (clipped), −3, 1, −1.6 (clipped), 1.1
    assert found.per_token.tolist() == pytest.approx([-2.56, 3.0, -1.0, 1.6, -1.1], abs=1e-5)
    assert found.clipped_high.tolist() == [True, False, False, False, False]
    assert found.clipped_low.tolist() == [False, False, False, True, False]
    found.per_token.sum().backward()
    # d(−rA)/d log r = −rA where not clipped
    assert logp.grad.tolist() == pytest.approx([0, 3.0, -1.0, 0, -1.1], abs=1e-5)


def test_a_weight_scales_its_token_and_its_gradient():
    logp, found = run([0.1, -0.1], [1.0, -1.0], weight=[2.0, 0.0])
    found.per_token.sum().backward()
    assert found.per_token.tolist() == pytest.approx([-2 * math.exp(0.1), 0])
    assert logp.grad.tolist() == pytest.approx([-2 * math.exp(0.1), 0])


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.floats(0, 5)), min_size=1, max_size=8)
)
def test_it_equals_the_unweighted_loss_with_advantages_weighted(rows):
    d, a, w = map(list, zip(*rows, strict=True))
    _, decoupled = run(d, a, weight=w)
    _, folded = run(d, [x * y for x, y in zip(a, w, strict=True)])
    torch.testing.assert_close(decoupled.per_token, folded.per_token, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_kept_reaches_neither_loss_nor_gradient(bad):
    logp, found = run([0.1, bad], [1.0, bad], weight=[1.0, bad], keep=[True, False])
    loss = token_sum(found.per_token, torch.tensor([True, False]), denominator=2.0)
    loss.backward()
    assert found.per_token[1] == 0
    assert loss.item() == pytest.approx(-math.exp(0.1) / 2)
    assert logp.grad[0] != 0
    assert logp.grad[1] == 0


def test_an_extreme_ratio_gives_a_finite_loss_and_gradient():
    logp, found = run([99.0, -99.0, 99.0], [1.0, -1.0, -1.0])
    found.per_token.sum().backward()
    assert found.per_token.isfinite().all()
    assert logp.grad.isfinite().all()


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 7))
def test_the_sum_over_micro_batches_equals_the_whole(keep, size):
    terms = torch.linspace(-2, 3, len(keep), dtype=torch.float64)
    kept = torch.tensor(keep)
    z = denominator("kept", num_all=len(keep), num_kept=sum(keep))
    whole = token_sum(terms, kept, denominator=z)
    parts = sum(
        token_sum(terms[i : i + size], kept[i : i + size], denominator=z)
        for i in range(0, len(keep), size)
    )
    assert float(parts) == pytest.approx(float(whole), abs=1e-12)


def test_denominators():
    assert denominator("all", num_all=100, num_kept=60) == 100
    assert denominator("kept", num_all=100, num_kept=60) == 60
    assert denominator("kept", num_all=100, num_kept=0) == 1
    with pytest.raises(DataError, match="denominator must be > 0"):
        token_sum(torch.ones(1), torch.ones(1, dtype=torch.bool), denominator=0.0)
