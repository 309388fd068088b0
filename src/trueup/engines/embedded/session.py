"""An episode in an engine: its slot, and the provenance of the turn that is being sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

from trueup.types import GenerateRequest, KVState, Span


@dataclass(slots=True, kw_only=True)
class Turn:
    """A request being served."""

    request: GenerateRequest
    t_submit: float
    t_start: float = 0.0
    tokens_prefilled: int = 0
    tokens_cached: int = 0
    tokens_recomputed: int = 0
    marks: list[tuple[int, int, KVState]] = field(default_factory=list)
    """(first token, version, KV state) of each run of tokens of one version."""

    def mark(self, at: int, version: int, kv: KVState) -> None:
        """From token `at` on this version samples; a mark that no token followed is replaced."""
        if self.marks and self.marks[-1][0] == at:
            self.marks.pop()
        self.marks.append((at, version, kv))

    def spans(self, tokens: int, *, engine: str, epoch: int, precision: str) -> tuple[Span, ...]:
        """The provenance of the first `tokens` sampled tokens."""
        sampling = self.request.sampling
        stops = [start for start, _, _ in self.marks[1:]] + [tokens]
        return tuple(
            Span(
                start=start,
                stop=stop,
                version=version,
                engine=engine,
                epoch=epoch,
                precision=precision,
                kv=kv,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
            )
            for (start, version, kv), stop in zip(self.marks, stops, strict=False)
            if start < stop
        )


@dataclass(slots=True, kw_only=True)
class Session:
    """An episode that owns a slot, between its turns too."""

    name: str
    slot: int
    version: int = -1
    """Version that wrote the slot's keys and values."""
    kv: KVState = KVState.FRESH
    """RECOMPUTED as long as keys and values that were computed again are in use."""
    turn: Turn | None = None
