"""Where the tokens of finished episodes wait for the trainer.

Rollout -> payload store -> trainer: the controller handles references only. The files live in the
run directory until the step that consumes them commits.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from trueup.errors import DataError
from trueup.training.codec import pack, unpack
from trueup.types import Episode, EpisodeRef

_FOLDER = "payload"


class PayloadStore:
    """One file per episode in a directory of its own."""

    def __init__(self, run: Path) -> None:
        """A folder in the run's directory, made if it is missing."""
        self._directory = run / _FOLDER
        self._directory.mkdir(exist_ok=True)

    def put(self, episode: Episode) -> EpisodeRef:
        """Store an episode; what the controller needs to know of it comes back."""
        self._path(episode.id).write_bytes(pack(episode))
        return ref_of(episode)

    def get(self, episode: str) -> Episode:
        """Read an episode.

        Raises:
            DataError: It is not there or not whole.
        """
        try:
            data = self._path(episode).read_bytes()
        except FileNotFoundError:
            raise DataError(
                field="episode", rule="one whose payload is stored", value=episode
            ) from None
        found = unpack(data)
        if not isinstance(found, Episode) or found.id != episode:
            raise DataError(field=f"payload of {episode}", rule="that episode", value=type(found))
        return found

    def discard(self, episode: str) -> None:
        """Forget an episode; unknown ones are ignored."""
        self._path(episode).unlink(missing_ok=True)

    def _path(self, episode: str) -> Path:
        return self._directory / f"{episode}.msgpack"


def clear(run: Path) -> None:
    """Remove what a run that ended left in its store."""
    shutil.rmtree(run / _FOLDER, ignore_errors=True)


def ref_of(episode: Episode) -> EpisodeRef:
    """Sizes and versions of an episode, without its tokens."""
    spans = [span for segment in episode.segments for span in segment.spans]
    versions = [span.version for span in spans]
    return EpisodeRef(
        id=episode.id,
        task=episode.task,
        group=episode.group,
        member=episode.member,
        attempt=episode.attempt,
        status=episode.status,
        reward=episode.reward,
        failure=episode.failure,
        tokens=sum(len(segment.token_ids) for segment in episode.segments),
        action_tokens=sum(len(segment.logp_behaviour) for segment in episode.segments),
        version_min=min(versions, default=-1),
        version_max=max(versions, default=-1),
        spans=tuple((s.version, s.engine, s.epoch, s.stop - s.start) for s in spans),
        turns=len(episode.turns),
        counters=episode.counters,
        t_submit=episode.t_submit,
        t_start=episode.t_start,
        t_end=episode.t_end,
    )
