"""Our sampler inside the batch of transformers, in the place of a logits processor.

transformers calls processors with the logits of every row that gets a token, and takes the argmax
of what they return. This one samples as the embedded engine does (noise by key, forced ids, exact
log-probs of the distribution after temperature and truncation), notes token, log-prob and version
where they arise, and leaves its token as the only maximum. The multinomial of transformers, whose
noise depends on everything else in the batch, is not used.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
)

from trueup.engines.batching.turns import Turn
from trueup.engines.embedded.activity import ActivityMeter
from trueup.engines.embedded.sampling import sample
from trueup.errors import EngineFault


class TurnSampler(ContinuousBatchingLogitsProcessor):
    """Runs in the thread that generates; the dictionary of turns is the engine's.

    Args:
        turns: By id of the request in the batch; ids that are missing are sampled for nobody.
    """

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012 (declared so by the base class)
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, turns: dict[str, Turn]) -> None:
        """Serve no version yet."""
        self.version = -1
        """Of the weights; set while the batch is paused."""
        self.beat = time.monotonic()
        """When the last step was over."""
        self.lock = threading.Lock()
        """Held while turns are extended: who holds it sees them whole."""
        self.meter = ActivityMeter()
        self._turns = turns
        self._rows: list[Turn | None] = []
        self._begin = 0.0

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """No argument travels in tensors."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: Sequence[Any]) -> Tensor:
        """Note whose rows the next logits will be."""
        self._begin = time.monotonic()
        self._rows = [self._turns.get(one.state.request_id) for one in requests_with_new_token]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    @torch.no_grad()
    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Sample a token per row and make it the maximum of its row.

        Args:
            scores: [R, V] float32 logits, changed in place. The rows of requests that get a token
                come first; behind them is one for each whose prompt is not yet computed whole.
            tensor_arg: Not used.
        """
        rows = self._rows
        own = scores[: len(rows)]
        if rows:
            tokens, logps = sample(own, *self._parameters(rows, own.device))
            own.scatter_(1, tokens[:, None], math.inf)
            self._note(rows, tokens.tolist(), logps.tolist())
        self.beat = time.monotonic()
        return scores

    def _parameters(
        self, rows: Sequence[Turn | None], device: torch.device
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """[rows] noise, temperature, top_k, top_p and forced ids, None where no row needs them."""

        def column(of: Callable[[Turn], float], other: float, dtype: torch.dtype) -> Tensor:
            values = [other if turn is None else of(turn) for turn in rows]
            return torch.tensor(values, dtype=dtype, device=device)

        temperature = column(lambda turn: turn.request.sampling.temperature, 1, torch.float64)
        top_k = column(lambda turn: turn.request.sampling.top_k, 0, torch.int64)
        top_p = column(lambda turn: turn.request.sampling.top_p, 1, torch.float64)
        forced = column(lambda turn: turn.forced, -1, torch.int64)
        truncated = bool((top_k > 0).any() or (top_p < 1).any())
        return (
            column(lambda turn: turn.noise[len(turn.ids)], 0.5, torch.float64),
            temperature if (temperature != 1).any() else None,
            top_k if truncated else None,
            top_p if truncated else None,
            forced if (forced >= 0).any() else None,
        )

    def _note(
        self, rows: Sequence[Turn | None], tokens: Sequence[int], logps: Sequence[float]
    ) -> None:
        now = time.monotonic()
        prefilled = 0
        with self.lock:
            for turn, token, logp in zip(rows, tokens, logps, strict=True):
                if turn is None or turn.future.done():
                    continue
                if math.isnan(logp) or (math.isinf(logp) and turn.forced < 0):
                    turn.fault = EngineFault(
                        field=f"logits of session {turn.request.session}",
                        rule="finite",
                        value="non-finite",
                    )
                turn.append(token, logp, self.version)
                prefilled += turn.prompt_size
                turn.prompt_size = 0
            self.meter.record(self._begin, now, decoded=len(rows), prefilled=prefilled)
