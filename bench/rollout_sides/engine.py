"""The embedded engine as a side."""

from __future__ import annotations

import itertools
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rollout_sides.traffic import Outcome, Traffic

from trueup.engines.embedded.core import EmbeddedCore
from trueup.models.load import load_model, state_tensors
from trueup.sync.digest import digest
from trueup.sync.inprocess import InProcessTransport
from trueup.types import Completion, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Embedded:
    """Serves one precision of a model with a number of slots.

    Args:
        model: In bfloat16, or its directory.
        slots: Samples at a time.
        quantize: As `EngineConfig.quantize`; the rest is bfloat16.
        device: Where to compute.
    """

    def __init__(
        self,
        model: Path | PreTrainedModel,
        slots: int,
        quantize: str = "none",
        *,
        device: str = "cpu",
    ) -> None:
        if isinstance(model, Path):
            model = load_model(model, dtype=torch.bfloat16)
        self.tensors = {name: tensor.cpu() for name, tensor in state_tensors(model).items()}
        if quantize != "none":  # a version is quantised from what the trainer has
            self.tensors = {name: tensor.float() for name, tensor in self.tensors.items()}
        self.transport = transport = InProcessTransport()
        self.core = EmbeddedCore(
            model,
            engine_id="bench",
            slots=slots,
            dtype="bfloat16",
            quantize=quantize,
            fetch=transport.fetch,
            digest=digest,
            device=device,
        )
        self.core.stage(transport.publish(0, self.tensors))
        self.core.swap()
        self._fresh = itertools.count()

    def submit(self, traffic: Traffic) -> dict[str, list[int]]:
        """Queue all of it; returns the prompt of every session."""
        queued = {}
        for prompt in traffic.requests():
            number = next(self._fresh)
            queued[str(number)] = prompt
            sampling = SamplingParams(
                max_tokens=traffic.max_tokens, stop_ids=traffic.stop_ids, key=(number,)
            )
            self.core.submit(
                GenerateRequest(
                    session=str(number), prompt_ids=array("i", prompt), sampling=sampling
                )
            )
        return queued

    def finish(self) -> list[Completion]:
        """Sample until nothing is left."""
        completions = []
        while self.core.busy:
            for completion in self.core.step():
                completions.append(completion)
                self.core.release(completion.session)
        assert not self.core.take_faults()
        return completions

    def run(self, traffic: Traffic) -> Outcome:
        """See `Side.run`."""
        begin = time.perf_counter()
        self.submit(traffic)
        tokens = sum(len(completion.logps) for completion in self.finish())
        return Outcome(tokens, time.perf_counter() - begin)
