"""The one log-prob function: target, snapshots of older versions, and reference are scored by it.

Two scorers that differ in batching, chunking or precision differ by more than a small update moves
a policy, so there is only this one. It computes what is needed and no more: hidden states of right-
padded micro-batches (under a causal model nothing sees the padding to its right, so there is no
mask), the LM head at the positions that predict an action, and the softmax in float32 or better, a
chunk of positions at a time. Neither forward nor backward ever holds [N, V].

Legend: N action tokens, n those of one micro-batch, S segments, L longest segment, V vocabulary,
H hidden size, C positions of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trueup.errors import CheckpointError
from trueup.models.packed import PackedBatch, microbatches

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What a policy thinks of the action tokens of a batch, in the batch's order."""

    logp: Tensor
    """[N] log-prob of each action token at the given temperature, float32."""
    entropy: Tensor | None
    """[N] entropy of the distribution it was drawn from, in nats, float32, no gradient."""


def action_logprobs(
    model: PreTrainedModel,
    batch: PackedBatch,
    *,
    temperature: float = 1.0,
    microbatch_tokens: int = 8192,
    chunk_tokens: int = 512,
    entropy: bool = False,
    dtype: torch.dtype | None = None,
) -> Scores:
    """Score the action tokens of a batch under a causal language model.

    Differentiable; with gradients on, the activations of *all* micro-batches live until backward,
    so a trainer that needs to bound them loops over `microbatches` itself.

    Args:
        model: Any Hugging Face causal LM whose head is one linear layer (see `verify_head`).
        batch: Segments; each action token is predicted from the token before it.
        temperature: Divides the logits, as in sampling.
        microbatch_tokens: Padded positions that one forward holds.
        chunk_tokens: Positions whose logits exist at once: memory is chunk_tokens · V floats.
        entropy: Also return the entropy, from the same logits.
        dtype: Arithmetic of the layers below the head where it is not the parameters' own
            (autocast). The head always is in theirs: rounded to bfloat16 a logit of 20 is off by up
            to .06.

    Raises:
        CheckpointError: The model has no LM head.
    """
    head = lm_head(model)
    logps: list[Tensor] = []
    entropies: list[Tensor] = []
    order: list[Tensor] = []
    for part in microbatches(batch, microbatch_tokens):
        if not len(part.actions):
            continue
        with torch.autocast(model.device.type, dtype, enabled=dtype is not None):
            states, ids = _predicting_states(model, part.batch)
        logp, entropy_ = score_states(head, states, ids, temperature, chunk_tokens, entropy)
        logps.append(logp)
        entropies.append(entropy_)
        order.append(part.actions)
    if not order:
        empty = torch.zeros(0, device=model.device)
        return Scores(logp=empty, entropy=empty if entropy else None)
    back = torch.cat(order).argsort().to(model.device)
    return Scores(
        logp=torch.cat(logps)[back], entropy=torch.cat(entropies)[back] if entropy else None
    )


@torch.no_grad()
def action_logits(
    model: PreTrainedModel,
    batch: PackedBatch,
    *,
    microbatch_tokens: int = 8192,
    chunk_tokens: int = 512,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The logits behind `action_logprobs`, for statistics of whole distributions.

    Args:
        model: As there, and so are the other arguments.
        batch: Segments.
        microbatch_tokens: Padded positions that one forward holds.
        chunk_tokens: Positions whose logits exist at once.

    Yields:
        [C] which of the N action tokens, and [C, V] the logits that predict them, in float32 or
        better; every action token once.
    """
    head = lm_head(model)
    for part in microbatches(batch, microbatch_tokens):
        if not len(part.actions):
            continue
        states, _ = _predicting_states(model, part.batch)
        for actions, chunk in zip(
            torch.split(part.actions, chunk_tokens), torch.split(states, chunk_tokens), strict=True
        ):
            logits = head(chunk)
            yield actions, logits.to(torch.promote_types(logits.dtype, torch.float32))


@torch.no_grad()
def verify_head(model: PreTrainedModel) -> None:
    """Refuse a model that does more between hidden states and logits than its linear head.

    Soft-capped or scaled logits would be scored wrongly without a sign of it.

    Raises:
        CheckpointError: The logits of the whole model are not the head of its hidden states.
    """
    ids = torch.arange(2, device=model.device)[None]
    whole = model(input_ids=ids, use_cache=False).logits
    ours = lm_head(model)(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    if not torch.allclose(whole.float(), ours.float(), rtol=1e-3, atol=1e-3):
        raise CheckpointError(
            field="model",
            rule="one whose logits are its linear head of the hidden states",
            value=type(model).__name__,
        )


def lm_head(model: Any) -> nn.Module:
    """The module that turns hidden states into logits.

    Raises:
        CheckpointError: The model has none.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise CheckpointError(
            field="model", rule="a causal LM with an LM head", value=type(model).__name__
        )
    return head


def _predicting_states(model: PreTrainedModel, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Hidden states [n, H] just before each action token, and the ids [n] of those tokens."""
    lengths = batch.lengths
    row = torch.arange(len(lengths)).repeat_interleave(lengths)  # [T]
    column = torch.arange(len(batch.token_ids)) - batch.offsets[row]  # [T]
    padded = batch.token_ids.new_zeros(len(lengths), int(lengths.max()))  # [S, L]
    padded[row, column] = batch.token_ids
    states = model.base_model(
        input_ids=padded.to(model.device), use_cache=False
    ).last_hidden_state  # [S, L, H]
    before = (row[batch.action_index], column[batch.action_index] - 1)
    return states[before], batch.token_ids[batch.action_index].to(model.device)


def score_states(
    head: nn.Module,
    states: Tensor,
    ids: Tensor,
    temperature: float,
    chunk_tokens: int = 512,
    entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [n] of ids behind hidden states.

    A chunk's logits are computed again in backward, not kept. Arguments as in `action_logprobs`.
    """

    def chunk(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(states)  # [C, V]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        norm = logits.logsumexp(-1)
        logp = logits.gather(-1, ids[:, None])[:, 0] - norm
        return logp.float(), _entropy(logits, norm) if entropy else logp.detach()

    chunks = zip(torch.split(states, chunk_tokens), torch.split(ids, chunk_tokens), strict=True)
    parts = [
        checkpoint(chunk, *part, use_reentrant=False, preserve_rng_state=False) for part in chunks
    ]
    logp, entropy_ = (torch.cat(column) for column in zip(*parts, strict=True))
    return logp, entropy_


@torch.no_grad()
def _entropy(logits: Tensor, norm: Tensor) -> Tensor:
    """H = log Z − E[logit]; a logit of −inf (probability 0) adds nothing."""
    p = (logits - norm[:, None]).exp()
    expected = torch.where(p > 0, p * logits, 0.0).sum(-1)
    return (norm - expected).float()
