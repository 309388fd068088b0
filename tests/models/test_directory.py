from pathlib import Path

import pytest

from trueup.errors import CheckpointError
from trueup.models.directory import MANIFEST, publish, verify


def _write(target: Path, text: str) -> None:
    with publish(target) as work:
        (work / "weights").write_text(text)


def test_a_published_directory_verifies_and_leaves_nothing_beside_it(tmp_path: Path):
    _write(tmp_path / "a", "one")
    assert verify(tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_publishing_again_replaces_the_whole_directory(tmp_path: Path):
    _write(tmp_path / "a", "one")
    with publish(tmp_path / "a") as work:
        (work / "other").write_text("two")
    assert {p.name for p in (tmp_path / "a").iterdir()} == {"other", MANIFEST}
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_failed_writer_leaves_the_old_directory(tmp_path: Path):
    _write(tmp_path / "a", "one")
    with pytest.raises(UnicodeEncodeError):
        _write(tmp_path / "a", "two\ud800")
    assert (tmp_path / "a" / "weights").read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_an_altered_a_missing_and_a_truncated_file_are_found(tmp_path: Path):
    for damage in (
        lambda path: path.write_text("onf"),
        lambda path: path.unlink(),
        lambda path: path.write_text("on"),
    ):
        _write(tmp_path / "a", "one")
        damage(tmp_path / "a" / "weights")
        with pytest.raises(CheckpointError, match="weights"):
            verify(tmp_path / "a")


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"files": 3}'])
def test_a_malformed_manifest_is_refused(content: str, tmp_path: Path):
    _write(tmp_path / "a", "one")
    (tmp_path / "a" / MANIFEST).write_text(content)
    with pytest.raises(CheckpointError, match="a manifest"):
        verify(tmp_path / "a")


def test_a_foreign_directory_has_no_manifest_and_a_missing_one_is_an_error(tmp_path: Path):
    assert not verify(tmp_path)
    with pytest.raises(CheckpointError, match="an existing directory"):
        verify(tmp_path / "nowhere")
