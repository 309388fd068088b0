"""Continuous batching of transformers behind the engine port.

A version is fetched and verified beside the decoding, copied into the model's own memory while the
batch is paused, and that memory is digested. What the cache holds of running turns is then computed
again (they re-enter the batch with what they have sampled), or kept and said so (`kv_mode`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trueup.engines.batching.batch import PAGE, Batch
from trueup.engines.batching.turns import Turn
from trueup.engines.embedded.parameters import verify
from trueup.engines.requests import demand_sound
from trueup.errors import EngineFault, TransportFault
from trueup.models.load import state_tensors
from trueup.types import (
    Activity,
    Completion,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    KVState,
    LoadReceipt,
    WeightManifest,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Fetch = Callable[[WeightManifest], Mapping[str, Tensor]]
Digest = Callable[[Mapping[str, Tensor]], str]


class BatchingEngine:
    """Implements `engines.base.Engine` in this process, with a thread that generates.

    Args:
        model: In evaluation mode; its own weights are not served.
        engine_id: Goes into every span.
        epoch: How often it had been started.
        slots: Turns in the batch at once.
        fetch: Reads a published version.
        digest: Digests named tensors as the manifests do.
        tokens_per_slot: Size of the cache, which all turns share.
        keep: Cached keys and values of running turns outlive a load.
        stall_s: A step, or the beginning of a pause, that takes longer is a fault.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        engine_id: str,
        epoch: int = 0,
        slots: int,
        fetch: Fetch,
        digest: Digest,
        tokens_per_slot: int = 1024,
        keep: bool = False,
        stall_s: float = 120.0,
    ) -> None:
        """Start empty; the first `load` makes it serve."""
        from trueup.engines.batching.sampler import TurnSampler

        config: Any = model.config
        self._vocab: int = config.vocab_size
        self._positions: int = config.max_position_embeddings
        self._precision = str(model.dtype).removeprefix("torch.")
        self._engine_id, self._epoch, self._slots = engine_id, epoch, slots
        self._fetch, self._digest, self._keep = fetch, digest, keep
        self._stall_s = stall_s
        self._tensors = state_tensors(model)
        self._spec = {name: (tuple(t.shape), t.dtype) for name, t in self._tensors.items()}
        self._turns: dict[str, Turn] = {}
        self._waiting: deque[Turn] = deque()
        self._sessions: set[str] = set()
        self._serial = 0
        self._sampler = TurnSampler(self._turns)
        self._batch = Batch(
            model,
            slots=slots,
            tokens=slots * tokens_per_slot,
            sampler=self._sampler,
            wait_s=stall_s,
        )
        self._loading = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self._fault: EngineFault | None = None

    async def info(self) -> EngineInfo:
        """See `Engine.info`."""
        return EngineInfo(
            engine=self._engine_id,
            epoch=self._epoch,
            kind="transformers",
            precision=self._precision,
            slots=self._slots,
            version=self._sampler.version,
            pid=os.getpid(),
            forces=True,
            cache_block=0,
        )

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`; cancelling it takes the turn out of the batch."""
        t_submit = time.monotonic()
        self._demand_servable(request)
        turn = Turn.of(request, t_submit)
        self._sessions.add(request.session)
        self._waiting.append(turn)
        self._admit()
        try:
            return await turn.future
        finally:
            self._take_out(turn)
            self._admit()

    async def release(self, session: str) -> None:
        """See `Engine.release`."""
        for turn in [*self._turns.values(), *self._waiting]:
            if turn.request.session == session:
                self._end(turn, FinishReason.ABORT)

    async def load(self, manifest: WeightManifest) -> LoadReceipt:
        """See `Engine.load`."""
        async with self._loading:
            self._demand_open()
            t_start = time.monotonic()
            tensors = await asyncio.to_thread(self._stage, manifest)
            t_staged = time.monotonic()
            self._demand_open()
            recomputed = await self._swap(manifest.version, tensors)
            pause_s = time.monotonic() - t_staged
            digest = await asyncio.to_thread(self._digest, self._tensors)
            if digest != manifest.digest:
                self._die(
                    EngineFault(
                        field=f"version {manifest.version}: digest of engine memory",
                        rule=manifest.digest,
                        value=digest,
                    )
                )
            self._demand_open()
            return LoadReceipt(
                engine=self._engine_id,
                epoch=self._epoch,
                version=manifest.version,
                digest=digest,
                t_start=t_start,
                t_staged=t_staged,
                t_end=time.monotonic(),
                tokens_recomputed=recomputed,
                pause_s=pause_s,
            )

    async def activity(self) -> list[Activity]:
        """See `Engine.activity`."""
        with self._sampler.lock:
            return self._sampler.meter.drain()

    async def close(self) -> None:
        """See `Engine.close`; may be called twice."""
        if self._fault is None:
            self._fault = EngineFault(
                field=f"engine {self._engine_id}", rule="open", value="closed"
            )
        for turn in [*self._turns.values(), *self._waiting]:
            self._end(turn, FinishReason.ABORT)
        if self._watch is not None:
            self._watch.cancel()
        async with self._loading:
            await asyncio.to_thread(self._batch.stop)

    def _stage(self, manifest: WeightManifest) -> Mapping[str, Tensor]:
        tensors = self._fetch(manifest)
        verify(self._spec, tensors, version=manifest.version)
        found = self._digest(tensors)
        if found != manifest.digest:
            raise TransportFault(
                field=f"version {manifest.version}: digest", rule=manifest.digest, value=found
            )
        return tensors

    async def _swap(self, version: int, tensors: Mapping[str, Tensor]) -> int:
        """Serve the tensors from the next token on; the tokens that are computed again."""
        if self._sampler.version < 0:
            self._copy(tensors)
            self._sampler.version = version
            self._batch.start()
            self._watch = asyncio.create_task(self._watched())
            return 0
        async with self._batch.paused():
            await asyncio.to_thread(self._copy, tensors)
            old, self._sampler.version = self._sampler.version, version
            self._sampler.beat = time.monotonic()
            return sum(self._carry(name, turn, old) for name, turn in [*self._turns.items()])

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        for name, own in self._tensors.items():
            own.copy_(tensors[name])

    def _carry(self, name: str, turn: Turn, old: int) -> int:
        """Take a running turn over a swap; the tokens of it that are computed again."""
        sampled = len(turn.ids)
        if sampled and self._keep:
            turn.kv = KVState.KEPT
            turn.context_versions = (*turn.context_versions, old)
            return 0
        # Of a turn without a sample nobody can see how much of its prompt is computed.
        cached = len(turn.request.prompt_ids) + sampled - 1 if sampled else 0
        if sampled:
            turn.kv = KVState.RECOMPUTED
            turn.recomputed += cached
        self._batch.withdraw(name)
        del self._turns[name]
        self._enter(turn)
        return cached

    def _admit(self) -> None:
        """Let turns into the batch in their order, as many as it can hold to their end."""
        while self._waiting and len(self._turns) < self._slots and self._fault is None:
            used = sum(_pages(turn.request) for turn in self._turns.values())
            if used + _pages(self._waiting[0].request) > self._batch.pages:
                return
            self._enter(self._waiting.popleft())

    def _enter(self, turn: Turn) -> None:
        self._serial += 1
        name = f"{turn.request.session}#{self._serial}"
        sampling, before = turn.request.sampling, len(turn.ids)
        turn.t_start = turn.t_start or time.monotonic()
        turn.prompt_size = len(turn.request.prompt_ids) + before
        self._turns[name] = turn
        if len(self._turns) == 1:
            self._sampler.beat = time.monotonic()
        try:
            self._batch.add(
                name,
                [*turn.request.prompt_ids, *turn.ids],
                max_tokens=sampling.max_tokens - before,
                stop_ids=sampling.stop_ids,
                ended=lambda output: self._ended(name, output, before),
            )
        except EngineFault as fault:
            self._die(fault)

    def _ended(self, name: str, output: Any, before: int) -> None:
        """The batch is done with a turn. What it says it took must be what was sampled for it."""
        turn = self._turns.pop(name, None)
        if turn is None:
            return
        sampled = turn.ids[before:].tolist()
        if output.error is not None:
            turn.fault = EngineFault(
                field="continuous batching", rule="without an error", value=output.error
            )
        elif output.generated_tokens != sampled and turn.fault is None:
            turn.fault = EngineFault(
                field=f"session {turn.request.session}: tokens of the batch",
                rule=f"those sampled for it, {sampled}",
                value=output.generated_tokens,
            )
        stopped = turn.ids and turn.ids[-1] in turn.request.sampling.stop_ids
        self._end(turn, FinishReason.STOP if stopped else FinishReason.LENGTH)

    def _end(self, turn: Turn, finish: FinishReason) -> None:
        """Answer who waits for a turn, once."""
        with self._sampler.lock:
            if turn.future.done():
                return
            if turn.fault is not None:
                turn.future.set_exception(turn.fault)
                return
            turn.future.set_result(
                turn.completion(
                    finish,
                    time.monotonic(),
                    engine=self._engine_id,
                    epoch=self._epoch,
                    precision=self._precision,
                )
            )

    def _take_out(self, turn: Turn) -> None:
        """Forget a turn, wherever it is."""
        self._sessions.discard(turn.request.session)
        if turn in self._waiting:
            self._waiting.remove(turn)
        for name in [name for name, other in self._turns.items() if other is turn]:
            del self._turns[name]
            self._batch.withdraw(name)

    async def _watched(self) -> None:
        """End everything when the batch dies or stands still."""
        while self._fault is None:
            await asyncio.sleep(min(0.5, self._stall_s / 4))
            if not self._batch.running:
                self._die(EngineFault(field="continuous batching", rule="running", value="stopped"))
            elif (
                self._turns
                and not self._loading.locked()
                and time.monotonic() - self._sampler.beat > self._stall_s
            ):
                self._die(
                    EngineFault(
                        field="continuous batching",
                        rule=f"a step within {self._stall_s:g} s",
                        value="none",
                    )
                )

    def _die(self, fault: EngineFault) -> None:
        self._fault = self._fault or fault
        for turn in [*self._turns.values(), *self._waiting]:
            turn.fault = turn.fault or fault
            self._end(turn, FinishReason.ABORT)

    def _demand_open(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _demand_servable(self, request: GenerateRequest) -> None:
        self._demand_open()
        if self._sampler.version < 0:
            raise EngineFault(
                field=f"engine {self._engine_id}", rule="serving a version", value="empty"
            )
        if request.session in self._sessions:
            raise EngineFault(
                field=f"session {request.session}",
                rule="without a turn in progress",
                value=request.session,
            )
        most = min(self._positions, PAGE * self._batch.pages)
        demand_sound(request, vocab_size=self._vocab, positions=most, forces=True)


def _pages(request: GenerateRequest) -> int:
    """Cache blocks that a turn fills by its end."""
    return -(-(len(request.prompt_ids) + request.sampling.max_tokens) // PAGE)
