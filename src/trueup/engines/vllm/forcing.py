"""Forced decoding inside vLLM: the ids are given, the log-probs stay those of sampling them.

A logits processor keeps track of which row of the batch is forced (vLLM has one interface for
that); it changes no logits. The sampler then replaces the sampled ids of those rows before it looks
up their log-probs in the distribution that it sampled from. Runs in vLLM's environment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.sampler import Sampler

from trueup.engines.vllm.wire import FORCED

if TYPE_CHECKING:
    import torch

Row = tuple[list[int], list[int]]
"""What a row has to say, and what it has said (vLLM appends to that list)."""


class ForcedRows(LogitsProcessor):  # type: ignore[misc]
    """Which rows of the batch are forced."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Start without any."""
        self.rows: dict[int, Row] = {}

    def is_argmax_invariant(self) -> bool:
        """It changes no logits."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests that come, go and move within the batch."""
        process_dict_updates(self.rows, batch_update, _row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave the distribution as it is."""
        return logits


class ForcingSampler(Sampler):  # type: ignore[misc]
    """vLLM's sampler, but for the ids of forced rows."""

    def sample(
        self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """[rows] ids and, if asked for, the [rows, vocabulary] log-probs they came from."""
        sampled, logps = super().sample(logits, sampling_metadata, *args, **kwargs)
        for processor in sampling_metadata.logitsprocs.argmax_invariant:
            if isinstance(processor, ForcedRows):
                for index, (ids, said) in processor.rows.items():
                    if len(said) < len(ids):
                        sampled[index] = ids[len(said)]
        return sampled, logps


def _row(params: Any, prompt_ids: list[int] | None, output_ids: list[int]) -> Row | None:
    ids = (params.extra_args or {}).get(FORCED)
    return None if ids is None else (ids, output_ids)
