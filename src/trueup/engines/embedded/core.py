"""Continuous batching without asyncio: submit, step, stage, swap, release.

One step computes every token that has no keys and values yet (the last sample of a decoding row,
the new part of a joining prompt, a whole prefix after a swap) in one ragged forward, and samples
one token per row. A session keeps its slot and cache between its turns, so it is never made
to wait for one again; others get slots in the order of their first request.
"""

from __future__ import annotations

import heapq
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trueup.engines.embedded.activity import ActivityMeter
from trueup.engines.embedded.architectures import build_network
from trueup.engines.embedded.memory import Arithmetic
from trueup.engines.embedded.network import Batch
from trueup.engines.embedded.sampling import kept_mass, sample
from trueup.engines.embedded.session import Session, Turn
from trueup.engines.embedded.slots import SlotTable
from trueup.engines.embedded.weights import Digest, DoubleBuffer, Fetch
from trueup.engines.requests import demand_sound
from trueup.errors import EngineFault
from trueup.models.load import load_model, state_tensors
from trueup.models.quantization.schemes import scheme
from trueup.types import Completion, FinishReason, GenerateRequest, Rescored, WeightManifest

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

_BATCH_TOKENS = 8192
"""Most tokens of one forward; bounds its activations, not what a step can hold."""

_RESCORED = 256
"""Positions whose logits exist at once where known tokens are scored again."""

_SHARED_FROM = 32
"""Length from which a prompt is copied from a session that has it; a shorter one is computed in
less time."""


class EmbeddedCore:
    """The synchronous engine.

    Args:
        model: A Hugging Face directory or a model in evaluation mode; gives the architecture.
            Its weights are not served: the first version arrives by `stage` and `swap` like every
            other.
        engine_id: Goes into every span.
        epoch: How often this engine had been started.
        slots: Sessions that can hold a cache at once.
        dtype: `float32` or `bfloat16`; a given model must have it, and published tensors too,
            unless they are quantised: then they are float32.
        quantize: Grid of weights and activations (`EngineConfig.quantize`).
        float32_head: Compute the logits in float32.
        kv_mode: What a swap does with the keys and values of running and idle sessions:
            `recompute` or `keep`.
        prefix_cache: Reuse keys and values of earlier turns and of equal prompts.
        fetch: Reads a published version.
        digest: Digests named tensors as the manifests do.
        device: Where to compute.

    Raises:
        EngineFault: The model's dtype is another one, or its architecture computes only plainly.
        ConfigError: No scheme has this name.
        CheckpointError: The directory holds no causal LM.
    """

    def __init__(
        self,
        model: Path | PreTrainedModel,
        *,
        engine_id: str,
        epoch: int = 0,
        slots: int,
        dtype: str = "float32",
        quantize: str = "none",
        float32_head: bool = False,
        kv_mode: str = "recompute",
        prefix_cache: bool = True,
        fetch: Fetch,
        digest: Digest,
        device: str = "cpu",
    ) -> None:
        """Read the architecture; start empty."""
        self.engine_id = engine_id
        self.epoch = epoch
        self.slots = slots
        self.precision = dtype if quantize == "none" else f"{dtype}+{quantize}"
        self.meter = ActivityMeter()
        self._keeps = kv_mode == "keep"
        self._prefix_cache = prefix_cache
        self._device = torch.device(device)
        arithmetic = Arithmetic(
            dtype=getattr(torch, dtype),
            head_dtype=torch.float32 if float32_head else getattr(torch, dtype),
            scheme=None if quantize == "none" else scheme(quantize),
        )
        if isinstance(model, Path):
            model = load_model(model, dtype=arithmetic.dtype)
        if model.dtype is not arithmetic.dtype:
            raise EngineFault(field="model.dtype", rule=dtype, value=str(model.dtype))
        config: Any = model.config
        self._vocab: int = config.vocab_size
        self._positions: int = config.max_position_embeddings
        self._network = build_network(model, slots, self._device, arithmetic)
        published = arithmetic.dtype if quantize == "none" else torch.float32
        self._weights = DoubleBuffer(
            {
                name: (tuple(t.shape), published if t.is_floating_point() else t.dtype)
                for name, t in state_tensors(model).items()
            },
            self._network.fused,
            self._device,
            prepare=self._network.prepare,
            fetch=fetch,
            digest=digest,
        )
        self._table = SlotTable(slots)
        self._free = list(range(slots))
        self._sessions: dict[str, Session] = {}
        self._by_slot: dict[int, Session] = {}
        self._returning: list[Session] = []
        self._newcomers: dict[str, Turn] = {}
        self._openings: dict[bytes, int] = {}
        """First prompt of a session -> the slot of the last one that began with it."""
        self._faults: list[tuple[str, EngineFault]] = []

    @property
    def version(self) -> int:
        """The version served; -1 before the first load."""
        return self._weights.version

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(
            self._table.running.any() or self._returning or (self._newcomers and self._free)
        )

    def submit(self, request: GenerateRequest) -> None:
        """Queue one turn.

        Raises:
            EngineFault: No version is served, the request is malformed or does not fit the model,
                or the session has a turn in progress.
        """
        self._demand_servable(request)
        turn = Turn(request=request, t_submit=time.monotonic())
        session = self._sessions.get(request.session)
        if session is None:
            self._newcomers[request.session] = turn
        else:
            session.turn = turn
            self._returning.append(session)

    def step(self) -> list[Completion]:
        """Admit who can be, compute one ragged batch, sample one token per running session.

        Returns:
            The turns that ended, in the order of their slots. Sessions that failed are in
            `take_faults`.
        """
        begin = time.monotonic()
        self._admit()
        if not self._table.running.any():
            return []
        batch = self._table.batch()
        decoding = (batch.counts == 1) & (self._table.filled > self._table.start)[batch.slots]
        tokens, logps = self._sample(self._logits(batch), batch.slots)
        finite = np.isfinite(logps) | (self._table.forcing[batch.slots] & ~np.isnan(logps))
        stopped, full = self._table.append(batch.slots, tokens, logps)
        end = time.monotonic()
        for slot in batch.slots[~finite].tolist():
            self._fail(self._by_slot[slot])
        completions = []
        ended = finite & (stopped | full)
        for slot, stop in sorted(zip(batch.slots[ended].tolist(), stopped[ended], strict=True)):
            finish = FinishReason.STOP if stop else FinishReason.LENGTH
            completions.append(self._complete(self._by_slot[slot], finish, end))
        self.meter.record(
            begin,
            end,
            decoded=len(batch.slots),
            prefilled=len(batch.tokens) - int(decoding.sum()),
        )
        return completions

    def take_faults(self) -> list[tuple[str, EngineFault]]:
        """Sessions that failed since the last call, with their fault; their slots are free."""
        found, self._faults = self._faults, []
        return found

    def stage(self, manifest: WeightManifest) -> str:
        """Fetch and verify a version beside the served one; safe to run in another thread.

        Returns:
            The digest of the engine's own copy.

        Raises:
            TransportFault: See `DoubleBuffer.stage`; nothing has changed.
        """
        return self._weights.stage(manifest)

    @property
    def prepare_s(self) -> float:
        """Seconds that repacking or quantising the last staged version took."""
        return self._weights.prepare_s

    def swap(self) -> int:
        """Serve what was staged, from the next token on.

        The caches of running sessions are recomputed by the next step and those of idle ones at
        their next turn; in mode `keep` they all stay as they are.

        Returns:
            Tokens of running sessions that will be computed again.
        """
        self._network.bind(self._weights.swap())
        recomputed = 0
        for slot in np.flatnonzero(self._table.running).tolist():
            session = self._by_slot[slot]
            assert session.turn is not None
            cached = int(self._table.cached[slot])
            if not self._keeps:
                self._table.cached[slot] = 0
                session.turn.tokens_recomputed += cached
                recomputed += cached
            session.serve(self.version, behind=cached, keeps=self._keeps)
            session.turn.mark(self._table.sampled(slot), session)
        return recomputed

    def attest(self) -> str:
        """Digest of the memory that is served now.

        Raises:
            EngineFault: Nothing is served yet.
        """
        return self._weights.attest()

    def release(self, name: str) -> Completion | None:
        """Forget a session.

        Returns:
            What its turn in progress had sampled, as an aborted completion; None if it had none.
        """
        now = time.monotonic()
        session = self._sessions.get(name)
        if session is None:
            queued = self._newcomers.pop(name, None)
            return None if queued is None else self._unstarted(queued, now)
        aborted = None
        if session in self._returning:
            assert session.turn is not None
            self._returning.remove(session)
            aborted = self._unstarted(session.turn, now)
        elif session.turn is not None:
            aborted = self._complete(session, FinishReason.ABORT, now)
        self._evict(session)
        return aborted

    def close(self) -> list[Completion]:
        """Release every session and the memory; returns what was aborted."""
        names = [*self._sessions, *self._newcomers]
        aborted = [ended for name in names if (ended := self.release(name)) is not None]
        self._network.close()
        self._weights.close()
        return aborted

    def _admit(self) -> None:
        """Begin every turn that has a slot, but those whose prompt is just being computed."""
        beginning, self._returning = self._returning, []
        while self._newcomers and self._free:
            name = next(iter(self._newcomers))
            turn, slot = self._newcomers.pop(name), heapq.heappop(self._free)
            session = Session(name=name, slot=slot, turn=turn)
            self._sessions[name] = self._by_slot[slot] = session
            beginning.append(session)
        computing: set[bytes] = set()
        for session in beginning:
            opening = self._opening(session)
            if opening in computing:
                self._returning.append(session)
                continue
            uncached = self._begin(session, opening)
            if opening and uncached > 1:
                computing.add(opening)

    def _opening(self, session: Session) -> bytes:
        """The prompt that a new session may share with others; empty if it shares none."""
        assert session.turn is not None
        prompt = session.turn.request.prompt_ids
        new = session.version < 0 and self._prefix_cache
        return prompt.tobytes() if new and len(prompt) >= _SHARED_FROM else b""

    def _begin(self, session: Session, opening: bytes) -> int:
        """Start a session's turn: what its cache shares with the prompt is not computed again.

        Returns:
            Prompt tokens that must be computed.
        """
        turn = session.turn
        assert turn is not None
        prompt = np.frombuffer(turn.request.prompt_ids, dtype=np.int32)
        known = self._table.common_prefix(session.slot, prompt) if self._prefix_cache else 0
        if opening:
            known = self._borrow(session, opening, prompt)
            self._openings[opening], session.opening = session.slot, opening
        if known and session.version != self.version and not self._keeps:
            turn.tokens_recomputed = known
            turn.tokens_prefilled = len(prompt) - known
        else:
            turn.tokens_cached = self._network.keep(session.slot, known)
            turn.tokens_prefilled = len(prompt) - turn.tokens_cached
        session.serve(self.version, behind=known, keeps=turn.tokens_cached > 0)
        self._table.begin(
            session.slot,
            prompt,
            turn.request.sampling,
            turn.request.forced_ids,
            cached=turn.tokens_cached,
        )
        turn.mark(0, session)
        turn.t_start = time.monotonic()
        return len(prompt) - turn.tokens_cached

    def _borrow(self, session: Session, opening: bytes, prompt: NDArray[np.int32]) -> int:
        """Copy what another session has cached of the same prompt; returns how much."""
        lender = self._by_slot.get(self._openings.get(opening, -1))
        if lender is None or lender.version != self.version:
            return 0
        known = self._table.common_prefix(lender.slot, prompt)
        session.version, session.writers = lender.version, list(lender.writers)
        return self._network.copy(lender.slot, session.slot, known) if known else 0

    def _logits(self, batch: Batch) -> Tensor:
        """[R, V]; what else the forward gives goes to the slots and turns."""
        whole = len(batch.tokens) <= _BATCH_TOKENS
        logits = []
        for part in [batch] if whole else batch.split(_BATCH_TOKENS):
            logits.append(self._network.forward(part))
            scales = self._network.scales()
            if scales is not None:
                rows = scales.expand(len(part.slots), -1)
                self._table.note_scales(part.slots, rows.numpy())
            states = self._network.states()
            if states is not None:
                self._rescore(part, states)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    @torch.inference_mode()
    def _rescore(self, batch: Batch, states: Tensor) -> None:
        """Keep what the weights that computed a cache again think of the tokens sampled before."""
        slots = np.repeat(batch.slots, batch.known)
        given = batch.tokens[batch.known_index()]
        parts = []
        for first in range(0, len(slots), _RESCORED):
            here = slice(first, first + _RESCORED)
            logits = self._network.logits(states[here])
            noise = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
            parts.append(
                sample(logits, noise, *self._truncation(slots[here]), self._tensor(given[here]))[1]
            )
        logps = torch.cat(parts).float().cpu().numpy()
        for slot, found in zip(
            batch.slots.tolist(), np.split(logps, np.cumsum(batch.known)[:-1]), strict=True
        ):
            turn = self._by_slot[slot].turn
            if len(found) and turn is not None:
                turn.rescored.append(
                    Rescored(version=self.version, start=0, logps=array("f", found.tobytes()))
                )

    @torch.inference_mode()
    def _sample(
        self, logits: Tensor, slots: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """[R] the next token of each slot, and its log-prob."""
        table = self._table
        temperature, top_k, top_p = self._truncation(slots)
        forced = table.forced(slots)
        tokens, logps = sample(
            logits,
            self._tensor(table.noise(slots)),
            temperature,
            top_k,
            top_p,
            None if forced is None else self._tensor(forced),
        )
        if top_p is not None:
            mass = kept_mass(logits, tokens, logps, temperature)
            table.note_kept_mass(slots, mass.cpu().numpy())
        return tokens.cpu().numpy(), logps.cpu().numpy()

    def _truncation(
        self, slots: NDArray[np.int64]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Temperature, top_k and top_p as `sample` takes them."""
        table = self._table
        temperature, top_k, top_p = table.temperature[slots], table.top_k[slots], table.top_p[slots]
        truncated = bool((top_k > 0).any() or (top_p < 1).any())
        return (
            self._tensor(temperature) if (temperature != 1).any() else None,
            self._tensor(top_k) if truncated else None,
            self._tensor(top_p) if truncated else None,
        )

    def _complete(self, session: Session, finish: FinishReason, now: float) -> Completion:
        turn = session.turn
        assert turn is not None
        session.turn = None
        replay = self._table.replay(session.slot)
        ids, logps = self._table.end(session.slot)
        return Completion(
            session=session.name,
            token_ids=ids,
            logps=logps,
            spans=turn.spans(
                len(ids), engine=self.engine_id, epoch=self.epoch, precision=self.precision
            ),
            finish=finish,
            tokens_prefilled=turn.tokens_prefilled,
            tokens_cached=turn.tokens_cached,
            tokens_recomputed=turn.tokens_recomputed,
            t_submit=turn.t_submit,
            t_start=turn.t_start,
            t_end=now,
            replay=replay,
            rescored=tuple(turn.rescored),
        )

    @staticmethod
    def _unstarted(turn: Turn, now: float) -> Completion:
        """An aborted completion without a token."""
        return Completion(
            session=turn.request.session,
            token_ids=array("i"),
            logps=array("f"),
            spans=(),
            finish=FinishReason.ABORT,
            tokens_prefilled=0,
            tokens_cached=0,
            tokens_recomputed=0,
            t_submit=turn.t_submit,
            t_start=now,
            t_end=now,
        )

    def _fail(self, session: Session) -> None:
        fault = EngineFault(
            field=f"logits of session {session.name}", rule="finite", value="non-finite"
        )
        self._network.clear(session.slot)
        self._evict(session)
        self._faults.append((session.name, fault))

    def _evict(self, session: Session) -> None:
        self._table.forget(session.slot)
        if self._openings.get(session.opening) == session.slot:
            del self._openings[session.opening]
        self._network.keep(session.slot, 0)
        del self._sessions[session.name], self._by_slot[session.slot]
        heapq.heappush(self._free, session.slot)

    def _demand_servable(self, request: GenerateRequest) -> None:
        name = request.session
        if self.version < 0:
            raise EngineFault(
                field=f"engine {self.engine_id}", rule="serving a version", value="empty"
            )
        session = self._sessions.get(name)
        if name in self._newcomers or (session is not None and session.turn is not None):
            raise EngineFault(
                field=f"session {name}", rule="without a turn in progress", value=name
            )
        demand_sound(request, vocab_size=self._vocab, positions=self._positions, forces=True)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
