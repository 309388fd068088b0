"""The batch of transformers: set up for our sampler, with a pause that an event loop can await.

Settings that follow from what spans say: no double buffering and no captured graphs (the sampler
runs in Python, and a pause lies between two whole steps), no sharing of cache blocks (they would
outlive the weights that wrote them), no replacement of the attention, and never more turns than
the cache can hold to their end, since what transformers evicts it computes again under the weights
of then, unseen.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from trueup.errors import EngineFault

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trueup.engines.batching.sampler import TurnSampler

PAGE = 32
"""Tokens of a cache block."""
_BATCH_TOKENS = 512
"""Most tokens of one forward: longer prompts are computed in parts."""
_STOP_S = 10.0


class Batch:
    """Owns the manager of transformers and its thread.

    Args:
        model: What computes; its attention is that of its configuration.
        slots: Requests at once.
        tokens: That the cache holds.
        sampler: Samples.
        wait_s: How long a pause may take to begin.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        tokens: int,
        sampler: TurnSampler,
        wait_s: float,
    ) -> None:
        """Allocate the cache when the thread starts, not yet."""
        from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList
        from transformers.generation.continuous_batching.cb_logits_processors import (
            ContinuousBatchingLogitsProcessorList,
        )

        self.pages = -(-tokens // PAGE)
        self._wait_s = wait_s
        untyped: Any = GenerationConfig
        settings: Any = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=self.pages,
            max_batch_tokens=max(_BATCH_TOKENS, slots),
            max_requests_per_batch=slots,
            safety_margin=0.0,
            allow_block_sharing=False,
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
        )
        greedy = untyped(do_sample=False, eos_token_id=-1)
        batched: Any = model
        self._manager = batched.init_continuous_batching(greedy, settings)
        processors: Any = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([sampler]))
        processors.tensors_required = 1
        self._manager.logit_processor = processors

    @property
    def running(self) -> bool:
        """Whether the thread generates."""
        return bool(self._manager.is_running())

    def start(self) -> None:
        """Start generating."""
        self._manager.start()

    def add(
        self,
        name: str,
        ids: Sequence[int],
        *,
        max_tokens: int,
        stop_ids: Sequence[int],
        ended: Callable[[Any], None],
    ) -> None:
        """Enter a request; `ended` is called in this event loop with its output, once.

        Raises:
            EngineFault: The thread has died.
        """
        self._manager.register_result_handler(name, ended)
        added = self._manager.add_request(
            list(ids), request_id=name, max_new_tokens=max_tokens, eos_token_id=list(stop_ids)
        )
        if added is None:
            self._manager.output_router.result_handlers.pop(name, None)
            raise EngineFault(field="continuous batching", rule="running", value="stopped")

    def withdraw(self, name: str) -> None:
        """Take a request out; at most one more token is computed for it, for nobody."""
        self._manager.output_router.result_handlers.pop(name, None)
        self._manager.cancel_request(name)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Between two steps; everything that ended before has been delivered.

        Raises:
            EngineFault: The pause did not begin in time, or the thread has died.
        """
        loop = asyncio.get_running_loop()
        begun: asyncio.Future[str] = loop.create_future()
        over = threading.Event()

        def say(word: str) -> None:
            if not begun.done():
                begun.set_result(word)

        def hold() -> None:
            try:
                with self._manager.pause():
                    loop.call_soon_threadsafe(say, "")
                    over.wait()
            except RuntimeError as error:  # raised before the pause: the thread is gone
                loop.call_soon_threadsafe(say, repr(error))

        threading.Thread(target=hold, daemon=True, name="trueup-pause").start()
        try:
            async with asyncio.timeout(self._wait_s):
                word = await begun
        except TimeoutError:
            over.set()
            raise EngineFault(
                field="continuous batching", rule=f"paused within {self._wait_s:g} s", value="busy"
            ) from None
        try:
            if word:
                raise EngineFault(field="continuous batching", rule="running", value=word)
            yield
        finally:
            over.set()

    def stop(self) -> None:
        """End the thread; blocks until the step in progress is over."""
        if self.running:
            self._manager.stop(block=True, timeout=_STOP_S, hard_stop=True)
