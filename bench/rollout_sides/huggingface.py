"""transformers as two sides: `generate` on padded batches, and its continuous batching."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from rollout_sides.traffic import Outcome, Traffic
from transformers import ContinuousBatchingConfig, GenerationConfig

from trueup.models.load import load_model


class Generate:
    """Left-padded batches of `slots`, each as long as its longest sample."""

    def __init__(self, directory: Path) -> None:
        self._model = _load(directory)
        self._pad: int = self._model.config.pad_token_id

    @torch.inference_mode()
    def run(self, traffic: Traffic) -> Outcome:
        """See `Side.run`."""
        begin = time.perf_counter()
        requests = list(traffic.requests())
        tokens = sum(
            self._batch(requests[first : first + traffic.slots], traffic)
            for first in range(0, len(requests), traffic.slots)
        )
        return Outcome(tokens, time.perf_counter() - begin)

    def _batch(self, requests: list[list[int]], traffic: Traffic) -> int:
        width = max(map(len, requests))
        ids = torch.full((len(requests), width), self._pad)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(requests):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        output = self._model.generate(
            ids,
            attention_mask=mask,
            generation_config=_sampling(
                traffic, self._pad, return_dict_in_generate=True, output_scores=True
            ),
        )
        new = output.sequences[:, width:]
        logps = [
            scores.gather(1, chosen[:, None])[:, 0] - scores.logsumexp(-1)
            for scores, chosen in zip(output.scores, new.T, strict=True)
        ]
        assert all(bool(logp.isfinite().all()) for logp in logps)
        if not traffic.stop_ids:
            return new.numel()
        stopped = torch.isin(new, torch.tensor(traffic.stop_ids)).int()
        return int((stopped.cumsum(1) - stopped == 0).sum())


class ContinuousBatching:
    """Its own scheduler over a paged cache."""

    def __init__(self, directory: Path) -> None:
        self._model = _load(directory)
        self._pad: int = self._model.config.pad_token_id

    def run(self, traffic: Traffic) -> Outcome:
        """See `Side.run`; starting and ending the scheduler's thread is not counted."""
        requests = list(traffic.requests())
        settings = ContinuousBatchingConfig(
            page_size=32, num_blocks=512, max_batch_tokens=512, return_logprobs=True
        )
        manager = self._model.continuous_batching_context_manager(
            generation_config=_sampling(traffic, self._pad), continuous_batching_config=settings
        )
        tokens = ended = 0
        with manager as running:
            begin = time.perf_counter()
            running.add_requests(inputs=requests, max_new_tokens=traffic.max_tokens)
            while ended < len(requests):
                result = running.get_result(timeout=60)
                assert result is not None, "nothing for a minute"
                assert result.error is None, result.error
                if result.is_finished():
                    ended += 1
                    assert len(result.logprobs) == len(result.generated_tokens)
                    tokens += len(result.logprobs)
            seconds = time.perf_counter() - begin
        return Outcome(tokens, seconds)


def _load(directory: Path) -> Any:
    """The model, without an end of its own: that of the traffic is the only one."""
    model: Any = load_model(directory, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    return model


def _sampling(traffic: Traffic, pad: int, **more: bool) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=traffic.max_tokens,
        eos_token_id=list(traffic.stop_ids) or None,
        pad_token_id=pad,
        **more,
    )
