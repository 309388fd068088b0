"""The policy behind a cache that several versions wrote: keys and values kept across updates.

An engine that keeps its cache when weights change samples from no version's policy: new weights
attend to what old ones wrote. The trainer can compute it, block by block, if it knows which version
wrote what, and that follows from the spans: the forward that computed a position is the one that
predicted the token after it, so its version is that of the next action token.

T tokens, N action tokens, S segments.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trueup.gap import distinct
from trueup.models.caching import cache_argument
from trueup.models.logprobs import lm_head, score_states
from trueup.models.packed import PackedBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def writers(batch: PackedBatch, version: Tensor) -> Tensor:
    """[T] which version computed each position; what follows the last action token has its version.

    Args:
        batch: Segments with at least one action token each.
        version: [N] that sampled each action token.
    """
    position = torch.arange(len(batch.token_ids))
    following = torch.searchsorted(batch.action_index, position, right=True)
    segment = torch.arange(len(batch.lengths)).repeat_interleave(batch.lengths)
    last = batch.action_offsets[1:][segment] - 1
    return version[torch.minimum(following, last)]


@torch.no_grad()
def hybrid_logprobs(
    model: PreTrainedModel,
    batch: PackedBatch,
    writer: Tensor,
    *,
    under: Callable[[int], AbstractContextManager[object]],
    temperature: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Score action tokens behind keys and values that several versions wrote: [N] float32.

    Args:
        model: Any Hugging Face causal LM with a cache.
        batch: Segments.
        writer: [T] version that computes each position, not decreasing within a segment.
        under: Puts a version's weights into the model while a block is computed.
        temperature: Divides the logits, as in sampling.
        dtype: Arithmetic below the head, as in `action_logprobs`.

    Raises:
        CheckpointError: The model has no LM head.
    """
    from transformers import DynamicCache

    head, argument = lm_head(model), cache_argument(model.base_model)
    caches = [DynamicCache(config=model.config) for _ in range(len(batch.lengths))]
    logp = torch.empty(len(batch.action_index))
    before = batch.action_index - 1
    for version in distinct(writer)[0].tolist():
        with under(version):
            for cache, (start, stop) in zip(caches, pairwise(batch.offsets.tolist()), strict=True):
                block = torch.nonzero(writer[start:stop] == version)[:, 0] + start
                if not len(block):
                    continue
                ids = batch.token_ids[block][None].to(model.device)
                with torch.autocast(model.device.type, dtype, enabled=dtype is not None):
                    output = model.base_model(input_ids=ids, use_cache=True, **{argument: cache})
                predicted = torch.nonzero((before >= block[0]) & (before <= block[-1]))[:, 0]
                if len(predicted):
                    behind = output.last_hidden_state[0, before[predicted] - block[0]]
                    sampled = batch.token_ids[batch.action_index[predicted]].to(model.device)
                    logp[predicted] = score_states(head, behind, sampled, temperature)[0].cpu()
    return logp
