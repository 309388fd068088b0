import hashlib
import math
import struct

import pytest
import torch

from trueup.engines.embedded.sampling import sample, uniforms


def repeated(probabilities: list[float], n: int) -> torch.Tensor:
    return torch.tensor(probabilities).log().expand(n, -1)


def truncated(n: int, k: int, p: float) -> dict[str, torch.Tensor]:
    return {"top_k": torch.full((n,), k), "top_p": torch.full((n,), p, dtype=torch.float64)}


def grid(n: int) -> torch.Tensor:
    """Uniforms that visit every interval of at least 1/n."""
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def test_uniforms_are_the_bytes_of_shake128_and_a_longer_draw_starts_with_a_shorter_one() -> None:
    digest = hashlib.shake_128(struct.pack("<2q", 3, -7)).digest(160)
    words = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(20)]
    reference = [(word >> 11) / 2**53 for word in words]
    assert uniforms((3, -7), 20).tolist() == reference
    assert uniforms((3, -7), 5).tolist() == reference[:5]


def test_uniforms_of_different_keys_differ() -> None:
    draws = {tuple(uniforms(key, 2)) for key in [(0,), (1,), (0, 0), (0, 1), (1, 0), ()]}
    assert len(draws) == 6


def test_uniforms_are_the_same_on_every_machine() -> None:
    assert uniforms((1, 2, 3), 3).tolist() == [
        0.7361586755438467,
        0.8280682788917358,
        0.828841130868876,
    ]


@pytest.mark.parametrize("size", [1, 5, 256, 1024, 1025, 5000])
def test_the_token_is_the_one_whose_cumulative_interval_holds_u(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = 3 * torch.randn(200, size, generator=generator)
    u = torch.rand(200, dtype=torch.float64, generator=generator)
    tokens, _ = sample(logits, u)
    sums = logits.double().softmax(-1).cumsum(-1)
    upper = sums.gather(1, tokens[:, None])[:, 0]
    lower = upper - logits.double().softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert bool(((u >= lower - 1e-6) & (u <= upper + 1e-6)).all())


def test_log_probs_of_a_large_vocabulary_are_exact_to_one_millionth() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(64, 49_152, generator=generator)
    temperature = torch.full((64,), 0.7)
    tokens, logps = sample(
        logits, torch.rand(64, dtype=torch.float64, generator=generator), temperature
    )
    # Against the logits that float32 division by the temperature gives: what was sampled from.
    exact = (logits / temperature[:, None]).double().log_softmax(-1).gather(1, tokens[:, None])
    assert float((logps - exact[:, 0]).abs().max()) <= 1e-6


def test_a_token_of_probability_zero_is_never_sampled_at_the_edges() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(3, -1)
    u = torch.tensor([0.0, 0.5, math.nextafter(1.0, 0.0)], dtype=torch.float64)
    tokens, logps = sample(logits, u)
    assert tokens.tolist() == [1, 3, 3]
    assert logps.tolist() == pytest.approx([-math.log(2)] * 3)


def test_frequencies_are_the_softmax_at_the_temperature() -> None:
    # Chi-square with 7 degrees of freedom; a fair sampler exceeds 40.5 with a chance of 1e-6, and
    # the key is fixed, so a pass is a pass for good.
    n = 20_000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.2])
    u = torch.from_numpy(uniforms((11,), n))
    tokens, _ = sample(logits.expand(n, -1), u, torch.full((n,), 1.5))
    expected = n * (logits.double() / 1.5).softmax(-1)
    counts = torch.bincount(tokens, minlength=8)
    assert float(((counts - expected) ** 2 / expected).sum()) < 40.5


@pytest.mark.parametrize(
    ("k", "p", "kept"),
    [
        (0, 0.7, {1: 0.5, 3: 0.25}),  # .5 alone is short of .7
        (0, 0.5, {1: 0.5}),  # reached exactly
        (3, 1.0, {1: 0.5, 3: 0.25, 0: 0.15}),
        (3, 0.8, {1: 0.5, 3: 0.25}),  # of the .9 that top_k kept, .75 are .83
        (1, 1.0, {1: 0.5}),
        (9, 1.0, {1: 0.5, 3: 0.25, 0: 0.15, 2: 0.1}),  # more than there are
        (0, 1e-9, {1: 0.5}),  # never empty
    ],
)
def test_truncation_keeps_the_hand_computed_set_and_renormalises(
    k: int, p: float, kept: dict[int, float]
) -> None:
    n = 200
    tokens, logps = sample(repeated([0.15, 0.5, 0.1, 0.25], n), grid(n), **truncated(n, k, p))
    assert set(tokens.tolist()) == set(kept)
    total = sum(kept.values())
    for token, logp in zip(tokens.tolist(), logps.tolist(), strict=True):
        assert logp == pytest.approx(math.log(kept[token] / total), abs=1e-6)


def test_truncation_breaks_ties_by_token_id() -> None:
    tokens, logps = sample(torch.zeros(100, 4), grid(100), **truncated(100, 2, 1.0))
    assert set(tokens.tolist()) == {0, 1}
    assert logps.tolist() == pytest.approx([-math.log(2)] * 100)


def test_truncation_of_one_row_leaves_the_others() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(2, -1)
    u = torch.tensor([0.95, 0.95], dtype=torch.float64)
    tokens, logps = sample(
        logits,
        u,
        top_k=torch.tensor([2, 0]),
        top_p=torch.ones(2, dtype=torch.float64),
    )
    assert tokens.tolist() == [1, 3]
    assert logps.tolist() == pytest.approx([math.log(3 / 7), math.log(0.1)], abs=1e-6)


@pytest.mark.parametrize("size", [6, 2000])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_told_by_nan_and_leaves_the_others(
    size: int, bad: float
) -> None:
    logits = torch.zeros(3, size)
    logits[1, 4] = bad
    tokens, logps = sample(logits, torch.full((3,), 0.5, dtype=torch.float64))
    assert torch.isnan(logps).tolist() == [False, True, False]
    assert 0 <= int(tokens[1]) < size
    assert logps[0].item() == pytest.approx(-math.log(size))


def test_a_forced_token_outside_the_kept_set_has_no_probability_there() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    tokens, logps = sample(
        logits,
        torch.zeros(2, dtype=torch.float64),
        top_k=torch.tensor([2, 2]),
        top_p=torch.ones(2),
        forced=torch.tensor([1, 2]),
    )
    assert tokens.tolist() == [1, 2]
    # Kept are e^2 and e^1: the second has 1 / (1 + e) of their mass.
    assert logps.tolist() == pytest.approx([-math.log(1 + math.e), -math.inf])
