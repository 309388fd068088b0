"""Episodes written out by hand."""

from array import array
from collections.abc import Sequence
from typing import Any

from trueup.types import Episode, EpisodeStatus, Segment, Span


def span(start: int, stop: int, version: int = 0, **provenance: Any) -> Span:
    """A span of one engine, in float32 and freshly computed unless said otherwise."""
    values = {"engine": "engine-0", "epoch": 0, "precision": "float32", **provenance}
    return Span(start=start, stop=stop, version=version, **values)


def segment(
    token_ids: Sequence[int],
    action: Sequence[int],
    *,
    logps: Sequence[float] | None = None,
    spans: Sequence[Span] | None = None,
    turn: Sequence[int] | None = None,
) -> Segment:
    """A segment; log-prob -1 and version 0 for every action token unless given."""
    n = sum(action)
    return Segment(
        token_ids=array("i", token_ids),
        action=array("b", action),
        turn=array("i", turn if turn is not None else [0] * len(token_ids)),
        logp_behaviour=array("f", logps if logps is not None else [-1.0] * n),
        spans=tuple(spans if spans is not None else [span(0, n)] * bool(n)),
    )


def episode(name: str, *segments: Segment, **changes: Any) -> Episode:
    """A graded episode."""
    values: dict[str, Any] = {
        "task": "t",
        "group": 0,
        "member": 0,
        "attempt": 0,
        "turns": (),
        "status": EpisodeStatus.DONE,
        "reward": 1.0,
        **changes,
    }
    return Episode(id=name, segments=segments, **values)
