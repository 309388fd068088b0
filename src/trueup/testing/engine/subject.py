"""The engine under test, and what is asked of it."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from trueup.engines.base import Engine
from trueup.testing.engine.statistics import Draws
from trueup.testing.protocol import NotExpressible
from trueup.types import Completion, EngineInfo, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from trueup.testing.engine.pushing import Publisher
    from trueup.testing.engine.scoring import Scorer

T = TypeVar("T")

PROMPTS, DRAWS = 6, 64
"""Prompts whose first tokens are drawn, and how often each."""
REPLIES, REPLY_TOKENS = 48, 12
"""Replies that are scored, and how long they are."""


@dataclass(kw_only=True)
class Subject:
    """An engine that serves a version, with what is known of it."""

    engine: Engine
    info: EngineInfo
    vocabulary: int
    """Ids are below it."""
    stop_id: int
    """A token that may end a reply."""
    scorer: Scorer | None = None
    """The trainer's forward; None: no model directory was given."""
    publisher: Publisher | None = None
    """Gives the engine weights; None: it takes none, or no model directory was given."""
    _asked: int = 0
    _known: dict[object, Any] = field(default_factory=dict)

    def prompts(self, count: int, length: int, salt: str) -> list[array[int]]:
        """Prompts of random ids; another salt gives others."""
        rng = random.Random(salt)
        ids = [token for token in range(self.vocabulary) if token != self.stop_id]
        return [array("i", rng.choices(ids, k=length)) for _ in range(count)]

    async def ask(
        self,
        prompt: array[int],
        max_tokens: int,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        stops: bool = False,
    ) -> Completion:
        """One reply in a session of its own, with noise of its own."""
        self._asked += 1
        session = f"check-{self._asked}"
        request = GenerateRequest(
            session=session,
            prompt_ids=prompt,
            sampling=SamplingParams(
                max_tokens=max_tokens,
                stop_ids=(self.stop_id,) if stops else (),
                temperature=temperature,
                top_p=top_p,
                key=(self._asked,),
            ),
        )
        try:
            return await self.engine.generate(request)
        finally:
            await self.engine.release(session)

    async def ask_all(
        self, prompts: Sequence[array[int]], max_tokens: int, **sampling: Any
    ) -> list[Completion]:
        """Replies to all prompts, asked at once."""
        return await asyncio.gather(*(self.ask(p, max_tokens, **sampling) for p in prompts))

    async def draws(self, *, temperature: float = 1.0, top_p: float = 1.0) -> list[Draws]:
        """First tokens of `PROMPTS` prompts, `DRAWS` of each, all asked at once; remembered."""

        async def ask() -> list[Draws]:
            asked = [p for p in self.prompts(PROMPTS, 8, "draws") for _ in range(DRAWS)]
            return firsts(await self.ask_all(asked, 1, temperature=temperature, top_p=top_p), DRAWS)

        return await self.once((temperature, top_p), ask)

    async def once(self, key: object, make: Callable[[], Awaitable[T]]) -> T:
        """What several checks need, made by the first of them."""
        if key not in self._known:
            self._known[key] = await make()
        found: T = self._known[key]
        return found

    def need_scorer(self) -> Scorer:
        """The trainer's forward.

        Raises:
            NotExpressible: No model directory was given.
        """
        if self.scorer is None:
            raise NotExpressible("no --trueup-model: nothing to compare log-probs with")
        return self.scorer

    def need_publisher(self) -> Publisher:
        """What gives the engine weights.

        Raises:
            NotExpressible: It takes none, or no model directory was given.
        """
        if self.publisher is None:
            raise NotExpressible("the engine takes no weights, or no --trueup-model was given")
        return self.publisher


def firsts(said: Sequence[Completion], each: int) -> list[Draws]:
    """First token and log-prob of every reply, `each` replies per prompt."""
    found = [(reply.token_ids[0], reply.logps[0]) for reply in said]
    return [found[i : i + each] for i in range(0, len(found), each)]
