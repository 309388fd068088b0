"""The embedded engine as a side."""

from __future__ import annotations

import itertools
import time
from array import array
from pathlib import Path

import torch
from rollout_sides.traffic import Outcome, Traffic

from trueup.engines.embedded.core import EmbeddedCore
from trueup.models.load import load_model, state_tensors
from trueup.sync.digest import digest
from trueup.sync.inprocess import InProcessTransport
from trueup.types import GenerateRequest, SamplingParams


class Embedded:
    """Serves one precision of a model with a number of slots.

    Args:
        directory: The model.
        slots: Samples at a time.
        quantize: As `EngineConfig.quantize`; the rest is bfloat16.
    """

    def __init__(self, directory: Path, slots: int, quantize: str = "none") -> None:
        model = load_model(directory, dtype=torch.bfloat16)
        tensors = state_tensors(model)
        if quantize != "none":  # a version is quantised from what the trainer has
            tensors = {name: tensor.float() for name, tensor in tensors.items()}
        transport = InProcessTransport()
        self.core = EmbeddedCore(
            model,
            engine_id="bench",
            slots=slots,
            dtype="bfloat16",
            quantize=quantize,
            fetch=transport.fetch,
            digest=digest,
        )
        self.core.stage(transport.publish(0, tensors))
        self.core.swap()
        self._fresh = itertools.count()

    def submit(self, traffic: Traffic) -> None:
        """Queue all of it."""
        for prompt in traffic.requests():
            number = next(self._fresh)
            sampling = SamplingParams(
                max_tokens=traffic.max_tokens, stop_ids=traffic.stop_ids, key=(number,)
            )
            self.core.submit(
                GenerateRequest(
                    session=str(number), prompt_ids=array("i", prompt), sampling=sampling
                )
            )

    def run(self, traffic: Traffic) -> Outcome:
        """See `Side.run`."""
        begin = time.perf_counter()
        self.submit(traffic)
        tokens = 0
        while self.core.busy:
            for completion in self.core.step():
                tokens += len(completion.logps)
                self.core.release(completion.session)
        assert not self.core.take_faults()
        return Outcome(tokens, time.perf_counter() - begin)
