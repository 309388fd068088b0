from pathlib import Path

import pytest

from support.episodes import episode, segment, span
from trueup.errors import DataError
from trueup.training.codec import pack
from trueup.training.payload import PayloadStore, clear, ref_of
from trueup.types import EpisodeStatus, Failure, FailureKind, Turn

TWO_SEGMENTS = episode(
    "e",
    segment([5, 6, 7, 8], [0, 1, 1, 0], spans=[span(0, 1, version=3), span(1, 2, version=4)]),
    segment([5, 9, 9], [0, 0, 1], spans=[span(0, 1, version=2, engine="engine-1", epoch=6)]),
    group=7,
    member=1,
    attempt=2,
    reward=0.5,
    turns=(Turn(t_start=0.0, t_end=1.0, tokens_in=1, tokens_out=2),),
    counters={"reads": 2},
    t_submit=1.0,
    t_start=2.0,
    t_end=3.0,
)


def test_an_episode_comes_back_as_it_was_stored(tmp_path: Path):
    store = PayloadStore(tmp_path)
    assert store.put(TWO_SEGMENTS) == ref_of(TWO_SEGMENTS)
    assert PayloadStore(tmp_path).get("e") == TWO_SEGMENTS


def test_a_reference_tells_sizes_and_versions_and_no_token():
    ref = ref_of(TWO_SEGMENTS)
    assert (ref.tokens, ref.action_tokens, ref.turns) == (7, 3, 1)
    assert (ref.version_min, ref.version_max) == (2, 4)
    assert ref.spans == ((3, "engine-0", 0, 1), (4, "engine-0", 0, 1), (2, "engine-1", 6, 1))
    assert (ref.id, ref.group, ref.member, ref.attempt, ref.task) == ("e", 7, 1, 2, "t")
    assert (ref.reward, ref.status, ref.counters) == (0.5, EpisodeStatus.DONE, {"reads": 2})
    assert (ref.t_submit, ref.t_start, ref.t_end) == (1.0, 2.0, 3.0)


@pytest.mark.parametrize("segments", [(), (segment([5, 6], [0, 0]),)], ids=["none", "no action"])
def test_an_episode_without_action_tokens_has_no_version(segments: tuple):
    failure = Failure(kind=FailureKind.ENVIRONMENT, reason="start")
    ref = ref_of(episode("e", *segments, status=EpisodeStatus.FAILED, reward=None, failure=failure))
    assert (ref.version_min, ref.version_max, ref.action_tokens, ref.spans) == (-1, -1, 0, ())
    assert (ref.reward, ref.failure) == (None, failure)


def test_a_discarded_episode_is_gone_and_may_be_discarded_again(tmp_path: Path):
    store = PayloadStore(tmp_path)
    store.put(TWO_SEGMENTS)
    store.discard("e")
    store.discard("e")
    with pytest.raises(DataError, match="one whose payload is stored, got 'e'"):
        store.get("e")


@pytest.mark.parametrize("content", [b"", pack(TWO_SEGMENTS)[:-1], pack(7), pack(episode("other"))])
def test_a_payload_that_is_not_that_episode_is_refused(content: bytes, tmp_path: Path):
    store = PayloadStore(tmp_path)
    store.put(TWO_SEGMENTS)
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    file.write_bytes(content)
    with pytest.raises(DataError):
        store.get("e")


def test_clearing_a_run_removes_every_payload_and_nothing_else(tmp_path: Path):
    (tmp_path / "run.db").touch()
    PayloadStore(tmp_path).put(TWO_SEGMENTS)
    clear(tmp_path)
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.db"]
