"""What an engine did, in stretches of about 50 ms: the raw material of a utilisation timeline."""

from __future__ import annotations

from trueup.types import Activity

_STRETCH_S = 0.05


class ActivityMeter:
    """Adds up steps into stretches; a pause of a stretch's length ends one."""

    def __init__(self) -> None:
        """Start with nothing done."""
        self._finished: list[Activity] = []
        self._current: Activity | None = None

    def record(self, t0: float, t1: float, *, decoded: int, prefilled: int) -> None:
        """Add one step.

        Args:
            t0: Its begin, monotonic seconds.
            t1: Its end.
            decoded: Tokens it sampled.
            prefilled: Other tokens it computed.
        """
        current = self._current
        if current is not None and (t0 - current.t1 >= _STRETCH_S or t1 - current.t0 >= _STRETCH_S):
            self._finished.append(current)
            current = None
        if current is None:
            current = Activity(t0=t0, t1=t1, tokens_decoded=0, tokens_prefilled=0, steps=0)
        self._current = Activity(
            t0=current.t0,
            t1=t1,
            tokens_decoded=current.tokens_decoded + decoded,
            tokens_prefilled=current.tokens_prefilled + prefilled,
            steps=current.steps + 1,
        )

    def drain(self) -> list[Activity]:
        """Everything since the last call, oldest first."""
        found = self._finished + ([self._current] if self._current is not None else [])
        self._finished, self._current = [], None
        return found
