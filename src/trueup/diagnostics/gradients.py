"""What a correction does to the gradient, from the gradients of the LM head alone.

The gradient of −Σ_t c_t log π(a_t) with respect to the head's weight matrix is Σ_t c_t δ_t h_tᵀ
with δ_t = π(·|t) − e_{a_t}: one outer product per token. So inner products of per-sample gradients
need no gradient: ⟨δ_s h_sᵀ, δ_t h_tᵀ⟩ = (δ_s·δ_t)(h_s·h_t). A whole V×H matrix never exists.

The head is the last layer, where the gradient of every sample is exact and cheap; directions there
stand in for those of the model.

Shapes: N action tokens, V vocabulary, H hidden size, K sets of coefficients, E samples, C chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.diagnostics.numerics import to_host
from trueup.errors import DataError

TOP_SHARE = 0.01
"""Share of the tokens, those of the largest weights, whose part of the gradient is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientComparison:
    """The corrected gradient beside the uncorrected one; 0 where a gradient is 0."""

    norm_uncorrected: float
    norm_corrected: float
    cosine: float
    """Of the angle between them."""
    top_share: float
    """⟨g_top, g⟩/‖g‖² of the corrected gradient, g_top that of the tokens whose weights are the
    largest `TOP_SHARE`: what they contribute; the rest contributes 1 minus it."""
    variance_uncorrected: float
    """Σ_e ‖g_e − ḡ‖² of the samples: the noise that their number divides."""
    variance_corrected: float


def head_inner_products(
    hidden: Tensor,
    logits: Tensor,
    token: Tensor,
    coefficients: Mapping[str, Tensor],
    sample: Tensor,
    num_samples: int,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> Tensor:
    """Inner products of the LM-head gradients of samples, [K, E, K, E] float64.

    Entry [j, e, k, f] is ⟨g_e under coefficients j, g_f under coefficients k⟩, where g_e is the sum
    over the tokens of sample e. Cost N²·(V + H) multiplications, memory N·(V + H + chunk).

    Args:
        hidden: [N, H] states that the head reads at each action token.
        logits: [N, V] its output, before the temperature.
        token: [N] int64 sampled tokens.
        coefficients: K sets [N]: what multiplies −log π of each token in the loss.
        sample: [N] int64 in [0, E): the sample of each token (its episode, say).
        num_samples: E.
        temperature: Of the sampling.
        chunk_tokens: C, rows of the token-by-token matrix that exist at once.

    Raises:
        DataError: Shapes disagree.
    """
    n = len(token)
    for name, value in {
        "hidden": hidden,
        "logits": logits,
        "sample": sample,
        **coefficients,
    }.items():
        if len(value) != n:
            raise DataError(field=name, rule=f"of {n} tokens", value=tuple(value.shape))
    h = hidden.detach().double()
    delta = torch.softmax(logits.detach().double() / temperature, -1) / temperature
    delta[torch.arange(n, device=delta.device), token] -= 1 / temperature
    c = torch.stack([value.detach().double() for value in coefficients.values()])  # [K, N]
    num_sets = len(c)
    found = h.new_zeros(num_sets, num_samples, num_sets, num_samples)
    for rows in torch.split(torch.arange(n, device=token.device), chunk_tokens):
        block = (delta[rows] @ delta.T) * (h[rows] @ h.T)  # [C, N]
        for k in range(num_sets):
            # Columns to samples, then rows to samples under each set.
            to = h.new_zeros(len(rows), num_samples).index_add(1, sample, block * c[k])
            for j in range(num_sets):
                found[j, :, k] += h.new_zeros(num_samples, num_samples).index_add(
                    0, sample[rows], to * c[j, rows][:, None]
                )
    return found


def compare_gradients(
    hidden: Tensor,
    logits: Tensor,
    token: Tensor,
    *,
    advantage: Tensor,
    weight: Tensor,
    sample: Tensor,
    num_samples: int,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> GradientComparison:
    """Compare the policy gradient with weights w·A with the one with A.

    Args:
        hidden: [N, H] states that the head reads at each action token.
        logits: [N, V] its output, before the temperature.
        token: [N] int64 sampled tokens.
        advantage: [N].
        weight: [N] applied weights, 0 for a rejected token.
        sample: [N] int64 in [0, E): the sample of each token.
        num_samples: E ≥ 1.
        temperature: Of the sampling.
        chunk_tokens: Rows of the token-by-token matrix that exist at once.
    """
    corrected = advantage * weight
    num_top = min(max(1, round(TOP_SHARE * len(weight))), len(weight))
    largest = weight.topk(num_top).indices
    top = torch.zeros_like(corrected)
    top[largest] = corrected[largest]
    products = head_inner_products(
        hidden,
        logits,
        token,
        {"uncorrected": advantage, "corrected": corrected, "top": top},
        sample,
        num_samples,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
    )
    whole = products.sum((1, 3))  # [3, 3]
    own = products.diagonal(dim1=1, dim2=3)  # [3, 3, E]
    noise = own.sum(-1).diagonal() - whole.diagonal() / num_samples
    plain, fixed, cross, of_top, noise_plain, noise_fixed = to_host(
        [whole[0, 0], whole[1, 1], whole[0, 1], whole[2, 1], noise[0], noise[1]]
    )
    scale = (max(plain, 0.0) * max(fixed, 0.0)) ** 0.5
    return GradientComparison(
        norm_uncorrected=max(plain, 0.0) ** 0.5,
        norm_corrected=max(fixed, 0.0) ** 0.5,
        cosine=min(max(cross / scale, -1.0), 1.0) if scale else 0.0,
        top_share=of_top / fixed if fixed > 0 else 0.0,
        variance_uncorrected=max(noise_plain, 0.0),
        variance_corrected=max(noise_fixed, 0.0),
    )
