"""An episode in an engine: its slot, and the provenance of the turn that is being sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

from trueup.types import GenerateRequest, KVState, Rescored, Span


@dataclass(slots=True, kw_only=True)
class Turn:
    """A request being served."""

    request: GenerateRequest
    t_submit: float
    t_start: float = 0.0
    tokens_prefilled: int = 0
    tokens_cached: int = 0
    tokens_recomputed: int = 0
    marks: list[tuple[int, int, KVState, tuple[int, ...]]] = field(default_factory=list)
    """(first token, version, KV state, versions of the cache) of each run of one provenance."""
    rescored: list[Rescored] = field(default_factory=list)

    def mark(self, at: int, session: Session) -> None:
        """From token `at` on the session is as it is now; a mark without a token is replaced."""
        if self.marks and self.marks[-1][0] == at:
            self.marks.pop()
        self.marks.append((at, session.version, session.kv, session.context_versions()))

    def spans(self, tokens: int, *, engine: str, epoch: int, precision: str) -> tuple[Span, ...]:
        """The provenance of the first `tokens` sampled tokens."""
        sampling = self.request.sampling
        stops = [start for start, *_ in self.marks[1:]] + [tokens]
        return tuple(
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
            for (start, version, kv, contexts), stop in zip(self.marks, stops, strict=False)
            if start < stop
        )


@dataclass(slots=True, kw_only=True)
class Session:
    """An episode that owns a slot, between its turns too."""

    name: str
    slot: int
    version: int = -1
    """Version that samples now, or sampled last."""
    kv: KVState = KVState.FRESH
    """RECOMPUTED as long as keys and values that were computed again are in use."""
    writers: list[tuple[int, int]] = field(default_factory=list)
    """(first position, version) of each run of cached positions that one version wrote."""
    opening: bytes = b""
    """First prompt, where others may share it."""
    turn: Turn | None = None

    def serve(self, version: int, *, behind: int, keeps: bool) -> None:
        """Sample with a version from now on, behind so many cached positions.

        Args:
            version: What samples.
            behind: Positions that were cached until now.
            keeps: They stay as they are; otherwise this version computes them again.
        """
        before, self.version = self.version, version
        if not keeps:
            self.writers = [(0, version)]
            if behind:
                self.kv = KVState.RECOMPUTED if before != version else self.kv
            else:
                self.kv = KVState.FRESH
            return
        self.writers = [run for run in self.writers if run[0] < behind]
        if not self.writers or self.writers[-1][1] != version:
            self.writers.append((behind, version))
        if self.writers[0][1] != version:
            self.kv = KVState.KEPT

    def context_versions(self) -> tuple[int, ...]:
        """Versions that wrote what is cached, where another than the present one did."""
        return tuple(wrote for _, wrote in self.writers[:-1])
