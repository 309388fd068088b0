"""Log-probs of what `transformers` samples, read while it decodes.

A trainer that generates with its own model has no behaviour log-probs: `generate` returns ids only.
Scoring these ids afterwards gives the trainer's numerics, not those of decoding (key-value cache,
batch shape, another precision), so that the gap would be 0 by construction. A hook on the model's
forward sees the logits that were really sampled from, and one step later which id was.

Shapes: B rows, V vocabulary, K decoded positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from trueup.errors import EngineFault


class DecodeLogps:
    """Context in which one call of `generate` is recorded; only one step of logits is held."""

    def __init__(self, model: nn.Module, *, temperature: float) -> None:
        """Record `model`, whose logits are divided by `temperature` and sampled untruncated."""
        self._model, self._temperature = model, temperature
        self._pending: Tensor | None = None  # [B, V] log-probs of the next id
        self._ids: list[Tensor] = []  # K-1 of [B]
        self._logps: list[Tensor] = []

    def __enter__(self) -> DecodeLogps:
        """Start recording."""
        self._handle = self._model.register_forward_hook(self._step, with_kwargs=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop recording."""
        self._handle.remove()

    @torch.no_grad()
    def _step(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        if self._pending is not None:
            self._take(kwargs["input_ids"][:, -1])
        logits = output.logits[:, -1].float() / self._temperature
        self._pending = logits.log_softmax(-1)

    def _take(self, ids: Tensor) -> None:
        assert self._pending is not None
        self._ids.append(ids)
        self._logps.append(self._pending.gather(1, ids[:, None]).squeeze(1))

    def of(self, completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob of each id of the completions that this call of `generate` returned.

        Raises:
            EngineFault: The recorded ids are not those of the completions.
        """
        longest = max(map(len, completions), default=0)
        last = [row[longest - 1] if len(row) == longest else 0 for row in completions]
        if self._pending is not None and len(self._pending) == len(last):
            self._take(torch.tensor(last, device=self._pending.device))
        ids = torch.stack(self._ids, 1).tolist() if self._ids else []
        if len(ids) != len(completions) or any(
            list(seen[: len(row)]) != list(row) for seen, row in zip(ids, completions, strict=True)
        ):
            raise EngineFault(
                field="completion_ids",
                rule="those that were seen while decoding",
                value=f"{len(completions)} completions of up to {longest} ids",
            )
        logps = torch.stack(self._logps, 1).tolist()
        return [seen[: len(row)] for seen, row in zip(logps, completions, strict=True)]
