"""A turn inside the batch: what was sampled of it so far, and under which weights."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trueup.engines.embedded.sampling import uniforms
from trueup.errors import EngineFault
from trueup.types import Completion, FinishReason, GenerateRequest, KVState, Span

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """A request on its way: waiting, in the batch under some id, or taken out of it."""

    request: GenerateRequest
    t_submit: float
    future: asyncio.Future[Completion]
    noise: NDArray[np.float64]
    """[max_tokens] one uniform per token."""
    t_start: float = 0.0
    ids: array[int] = field(default_factory=lambda: array("i"))
    logps: array[float] = field(default_factory=lambda: array("f"))
    kv: KVState = KVState.FRESH
    context_versions: tuple[int, ...] = ()
    recomputed: int = 0
    prompt_size: int = 0
    """Tokens to compute before the next sample: more than one when it enters the batch."""
    fault: EngineFault | None = None
    _marks: list[tuple[int, int, KVState, tuple[int, ...]]] = field(default_factory=list)

    @classmethod
    def of(cls, request: GenerateRequest, t_submit: float) -> Turn:
        """A turn that waits; to be called in the event loop that awaits it."""
        return cls(
            request=request,
            t_submit=t_submit,
            future=asyncio.get_running_loop().create_future(),
            noise=uniforms(request.sampling.key, request.sampling.max_tokens),
        )

    @property
    def forced(self) -> int:
        """The id to take next; -1: sample it."""
        ids = self.request.forced_ids
        return -1 if ids is None else ids[len(self.ids)]

    def append(self, token: int, logp: float, version: int) -> None:
        """Take in what was sampled, with the weights that sampled it."""
        provenance = (version, self.kv, self.context_versions)
        if not self._marks or self._marks[-1][1:] != provenance:
            self._marks.append((len(self.ids), *provenance))
        self.ids.append(token)
        self.logps.append(logp)

    def completion(
        self, finish: FinishReason, now: float, *, engine: str, epoch: int, precision: str
    ) -> Completion:
        """What it has come to. Nothing of a prompt is reused, so all of it was computed."""
        request, sampling = self.request, self.request.sampling
        bounds = [start for start, *_ in self._marks] + [len(self.ids)]
        runs = zip(self._marks, bounds[1:], strict=True)
        return Completion(
            session=request.session,
            token_ids=self.ids,
            logps=self.logps,
            spans=tuple(
                Span(
                    start=start,
                    stop=stop,
                    version=version,
                    engine=engine,
                    epoch=epoch,
                    precision=precision,
                    kv=kv,
                    context_versions=contexts,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                )
                for (start, version, kv, contexts), stop in runs
            ),
            finish=finish,
            tokens_prefilled=len(request.prompt_ids) if self.t_start else 0,
            tokens_cached=0,
            tokens_recomputed=self.recomputed,
            t_submit=self.t_submit,
            t_start=self.t_start or now,
            t_end=now,
        )
