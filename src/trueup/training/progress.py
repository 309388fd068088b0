"""What the controller tells whoever watches, once per change of state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A plain snapshot; figures of a step are None until its first commit."""

    step: int
    """Step batches trained."""
    version: int
    """The trainer's weight version."""
    reward: float | None = None
    """Mean reward of the last step batch."""
    mean_lag: float | None = None
    """Versions, over its action tokens."""
    max_lag: int | None = None
    mean_abs_gap: float | None = None
    """Mean |log π_old − log μ| in nats."""
    ess: float | None = None
    """ESS ratio of the weights in the loss."""
    episodes_per_s: float | None = None
    running: int = 0
    """Episodes in flight."""
    waiting_groups: int = 0
    """Finished groups that wait for the trainer."""
    who_waits: str = ""
    """In words: `trainer waits for episodes`, `engine-0 waits for admission`, ..."""
    phase: str = ""
    """What happens now: `sampling`, `training`, `publishing`, `evaluating`, ..."""
