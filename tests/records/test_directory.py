import pytest

from trueup.errors import RunDirectoryError
from trueup.records.directory import RunDirectory


def test_create_makes_the_folders_and_open_finds_the_run(tmp_path):
    run = RunDirectory.create(tmp_path / "runs", "tiny-1")
    assert run.name == "tiny-1"
    assert run.episodes.is_dir()
    assert run.checkpoints.is_dir()
    assert run.logs.is_dir()
    run.ledger.touch()
    assert RunDirectory.open(tmp_path / "runs" / "tiny-1") == run


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "../a", "a b", "a\n", "ä", "x" * 101, "a\0b"]
)
def test_a_name_that_could_lead_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(RunDirectoryError, match="run must be 1 to 100 of"):
        RunDirectory.create(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_leads_out_of_the_root_is_refused(tmp_path):
    root, outside = tmp_path / "runs", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "run").symlink_to(outside)
    with pytest.raises(RunDirectoryError, match="inside"):
        RunDirectory.create(root, "run")


def test_the_root_itself_may_be_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    assert RunDirectory.create(tmp_path / "runs", "a").path == (tmp_path / "disk" / "a").resolve()


def test_an_existing_run_is_not_created_again(tmp_path):
    RunDirectory.create(tmp_path, "a").ledger.touch()
    with pytest.raises(RunDirectoryError, match="new or empty"):
        RunDirectory.create(tmp_path, "a")


def test_a_foreign_directory_is_not_opened(tmp_path):
    with pytest.raises(RunDirectoryError, match=r"holds run\.db"):
        RunDirectory.open(tmp_path)


def test_files_have_fixed_names(tmp_path):
    run = RunDirectory(tmp_path)
    assert run.episode_file(7).name == "step-000007.parquet"
    assert run.checkpoint(12).name == "step-000012"
    assert run.log("engine-0").name == "engine-0.log"
    with pytest.raises(RunDirectoryError, match="actor"):
        run.log("../engine")


def test_a_planned_directory_is_refused_like_a_created_one_and_not_made(tmp_path):
    root = tmp_path / "runs"
    assert RunDirectory.planned(root, "a").path == root / "a"
    assert not root.exists()
    RunDirectory.create(root, "a")
    with pytest.raises(RunDirectoryError, match="new or empty"):
        RunDirectory.planned(root, "a")
    with pytest.raises(RunDirectoryError, match="run must be 1 to 100 of"):
        RunDirectory.planned(root, "../a")


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="run must be a directory that can be made"):
        RunDirectory.create(tmp_path / "file", "a")
