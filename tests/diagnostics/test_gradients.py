import pytest
import torch
from torch import nn

from trueup.diagnostics.gradients import compare_gradients, head_inner_products
from trueup.errors import DataError

N, V, H, E = 12, 7, 5, 4
SAMPLE = torch.arange(N) // 3


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(H, V, bias=False).double()
    hidden = torch.randn(N, H, generator=generator).double()
    token = torch.randint(V, (N,), generator=generator)
    advantage = torch.randn(N, generator=generator)
    weight = torch.rand(N, generator=generator) * 2
    return head, hidden, token, advantage, weight


def gradient(head, hidden, token, coefficient, where, temperature):
    """What autograd says of −Σ c log π over some tokens, [V·H]."""
    logp = (head(hidden) / temperature).log_softmax(-1)[torch.arange(N), token]
    loss = -(coefficient.double() * logp)[where].sum()
    return torch.autograd.grad(loss, head.weight)[0].flatten()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [5, 1024])
def test_inner_products_are_those_of_autograd(temperature, chunk):
    head, hidden, token, advantage, weight = problem()
    sets = {"plain": advantage, "weighted": advantage * weight}
    found = head_inner_products(
        hidden,
        head(hidden),
        token,
        sets,
        SAMPLE,
        E,
        temperature=temperature,
        chunk_tokens=chunk,
    )
    rows = torch.stack(
        [
            gradient(head, hidden, token, c, e == SAMPLE, temperature)
            for c in sets.values()
            for e in range(E)
        ]
    )
    torch.testing.assert_close(found.reshape(2 * E, 2 * E), rows @ rows.T)


def test_the_comparison_is_of_the_whole_gradients():
    head, hidden, token, advantage, weight = problem(1)
    found = compare_gradients(
        hidden,
        head(hidden),
        token,
        advantage=advantage,
        weight=weight,
        sample=SAMPLE,
        num_samples=E,
    )
    every = torch.ones(N, dtype=torch.bool)
    plain = gradient(head, hidden, token, advantage, every, 1.0)
    fixed = gradient(head, hidden, token, advantage * weight, every, 1.0)
    top = gradient(head, hidden, token, advantage * weight, torch.arange(N) == weight.argmax(), 1.0)
    assert found.norm_uncorrected == pytest.approx(float(plain.norm()))
    assert found.norm_corrected == pytest.approx(float(fixed.norm()))
    assert found.cosine == pytest.approx(float(plain @ fixed / plain.norm() / fixed.norm()))
    assert found.top_share == pytest.approx(float(top @ fixed / fixed.square().sum()))
    each = torch.stack(
        [gradient(head, hidden, token, advantage, e == SAMPLE, 1.0) for e in range(E)]
    )
    noise = (each - each.mean(0)).square().sum()
    assert found.variance_uncorrected == pytest.approx(float(noise))


def test_weights_of_one_change_nothing_and_weights_of_zero_leave_nothing():
    head, hidden, token, advantage, _ = problem()
    same, gone = (
        compare_gradients(
            hidden,
            head(hidden),
            token,
            advantage=advantage,
            weight=torch.full((N,), w),
            sample=SAMPLE,
            num_samples=E,
        )
        for w in (1.0, 0.0)
    )
    assert same.cosine == pytest.approx(1.0)
    assert same.norm_corrected == pytest.approx(same.norm_uncorrected)
    assert (gone.norm_corrected, gone.cosine, gone.top_share) == (0, 0, 0)


def test_one_token_that_carries_the_gradient_is_its_top_share():
    head, hidden, token, _, _ = problem()
    advantage, weight = torch.ones(N), torch.full((N,), 1e-3)
    weight[4] = 5.0
    found = compare_gradients(
        hidden,
        head(hidden),
        token,
        advantage=advantage,
        weight=weight,
        sample=SAMPLE,
        num_samples=E,
    )
    assert found.top_share == pytest.approx(1.0, abs=0.02)


def test_shapes_that_disagree_are_refused():
    head, hidden, token, advantage, _ = problem()
    with pytest.raises(DataError, match="advantage must be of 12 tokens"):
        head_inner_products(hidden, head(hidden), token, {"advantage": advantage[1:]}, SAMPLE, E)
