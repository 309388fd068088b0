import json
import os
from pathlib import Path

import pytest

from support.run_writer import RunWriter
from trueup import config
from trueup.cli.runs import newest, planned
from trueup.environments.sandbox.none import NoSandbox
from trueup.environments.table import build
from trueup.models.tiny import SPECIALS, build_tokenizer, tiny_config
from trueup.records.lock import RunLock

OPEN = 'sandbox.kind="none"'
"""No test here runs what a model wrote, and a machine without a sandbox can be tested, too."""
SMALL = (
    "train.steps=1",
    "train.groups_per_step=2",
    "train.samples_per_group=2",
    "eval.samples=1",
    "environment.workers=1",
)
SUMMARY = {
    "run",
    "steps",
    "base_pass_rate",
    "heldout_pass_rate",
    "gain",
    "gain_low",
    "gain_high",
    "reads_per_episode",
    "episodes_launched",
    "episodes_trained",
    "episodes_per_s",
    "mean_token_lag",
    "max_token_lag",
    "wall_s",
}


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (("tiny-asink",), "config", "unknown recipe 'tiny-asink'; did you mean 'tiny-async'?"),
        (("train.step=3",), "config", "unknown key 'train.step'; did you mean 'train.steps'?"),
        (("train.steps=0",), "config", "train.steps must be greater than or equal to 1, got 0"),
        (("train.steps=ten",), "config", "train.steps must be a valid integer, got 'ten'"),
        (
            ("train.minibatches=3",),
            "config",
            "train.minibatches must be a divisor of the 64 episodes of a step batch, got 3",
        ),
        (
            ("train.steps", "3"),
            "usage",
            "arguments must be at most one recipe, and changes of the form key.path=value, "
            "got 'train.steps 3'",
        ),
        (("my.toml",), "usage", "unknown recipe 'my.toml'; a file is given as --config my.toml"),
        (("--config", "absent.toml"), "config", "the configuration absent.toml cannot be read"),
        (("tiny-sync", "--config", "x.toml"), "usage", "a recipe and --config exclude each other"),
        (("--run", "runs/.."), "run_directory", "run must be 1 to 100 of A-Z a-z 0-9 . _ -"),
        (("--run", "runs/a b"), "run_directory", "without a leading dot, got 'a b'"),
        (("--run", ""), "run_directory", "got ''"),
        (("--resume",), "run_directory", "there is no run in runs/; name one with --run"),
        (("--resume", "--run", "runs/a"), "run_directory", "run must be the directory of a run"),
        (("--resume", "tiny-sync"), "usage", "a resumed run has its configuration"),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_what_is_wrong_is_refused_before_anything_is_written(
    trueup, tmp_path, words, kind, message, dry
):
    answer = trueup("train", *words, *dry, "--json")
    assert answer.code == 2
    assert answer.out.count("\n") == 1
    assert answer.error.keys() == {"kind", "field", "rule", "value", "message"}
    assert answer.error["kind"] == kind
    assert message in answer.error["message"]
    assert answer.err.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("correction.preset=tiss", "correction.preset must be one of none, is, seq-is, tis"),
        ("correction.filters.gio={}", "correction.filters must be one of mis, seq-mis, geo"),
        ("correction.filters.geo.low=1.5", "correction.filters.geo.low must be <= 1, got 1.5"),
        ("correction.params.cup=1", "correction.params.cup must be one of cap"),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_wrong_correction_is_refused_before_anything_is_written(
    trueup, tmp_path, change, message, dry
):
    answer = trueup("train", change, *dry, OPEN, "--json")
    assert answer.code == 2
    assert answer.error["kind"] == "config"
    assert message in answer.error["message"]
    assert list(tmp_path.iterdir()) == []


def test_a_rehearsal_says_what_would_happen_and_writes_nothing(trueup, tmp_path):
    answer = trueup("train", "--dry-run", "tiny-sync", "train.steps=3", OPEN)
    assert answer.code == 0
    assert "tiny-sync would run in runs/tiny-sync-1" in answer.out
    assert "3 steps of 8 groups × 8 samples = 64 episodes" in answer.out
    assert "schedule.staleness = 0  (default 2)" in answer.out
    assert "controller, learner, engine-0, rollout" in answer.out
    assert list(tmp_path.iterdir()) == []


def test_a_rehearsal_names_the_whole_correction(trueup):
    words = ("correction.filters.geo.high=1.1", "correction.on=engine", "correction.normalize=true")
    answer = trueup("train", "--dry-run", *words, OPEN)
    assert answer.code == 0
    assert "tis after geo, of engine alone, normalised" in answer.out


def test_a_rehearsal_as_json(trueup):
    answer = trueup("train", "--dry-run", "--run", "x/y", "schedule.staleness=4", OPEN, "--json")
    assert answer.out.count("\n") == 1
    found = answer.json
    assert found["directory"] == "x/y"
    assert found["changed"] == {"schedule.staleness": 4, "sandbox.kind": "none"}
    assert (found["first_step"], found["steps"], found["episodes_per_step"]) == (0, 40, 64)
    assert found["staleness_bound"] == 4


def test_on_logical_time_the_rollout_is_no_process_of_its_own(trueup):
    found = trueup("train", "--dry-run", "train.deterministic=true", OPEN, "--json").json
    assert found["processes"] == ["controller", "learner", "engine-0"]


def test_without_a_sandbox_training_is_refused_with_the_way_out(trueup_without_sandbox, tmp_path):
    for words in (("--dry-run",), ()):
        answer = trueup_without_sandbox("train", *words, "--json")
        assert (answer.code, answer.error["kind"]) == (2, "sandbox")
        assert 'sandbox.kind = "none"' in answer.error["message"]
        assert list(tmp_path.iterdir()) == []


def test_a_new_run_takes_the_next_free_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tiny-async-2", "tiny-async-9", "tiny-async-x", "tiny-sync-30"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert planned(None, "tiny-async").path == tmp_path / "runs" / "tiny-async-10"
    assert planned(None, "mine").path == tmp_path / "runs" / "mine-1"
    assert planned(Path("elsewhere/a"), "mine").path == tmp_path / "elsewhere" / "a"


def test_a_file_gives_its_runs_a_name_that_is_allowed(trueup, tmp_path):
    (tmp_path / "my best run.toml").write_text("")
    found = trueup("train", "--config", "my best run.toml", "--dry-run", OPEN, "--json").json
    assert found["run"] == "my-best-run-1"


def test_the_newest_run_is_the_one_written_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, written in (("b", 100), ("a", 300), ("c", 200)):
        run = RunWriter(tmp_path / "runs", name)
        os.utime(run.directory.ledger, (written, written))
    assert newest().name == "a"


def test_a_run_that_exists_is_not_begun_again(trueup, tmp_path):
    RunWriter(tmp_path / "runs", "a").close()
    answer = trueup("train", "--run", "runs/a")
    assert answer.code == 2
    assert "run must be a new or empty directory" in answer.err


def test_a_run_that_is_in_use_is_refused_with_its_holder(trueup, tmp_path):
    run = RunWriter(tmp_path / "runs", "a", (OPEN,))
    run.close()
    with RunLock(run.directory.lock):
        answer = trueup("train", "--resume", "--run", "runs/a", "--json")
    assert (answer.code, answer.error["kind"]) == (2, "run_directory")
    assert f"is in use by pid {os.getpid()}" in answer.error["message"]


def test_a_run_without_a_checkpoint_cannot_be_resumed(trueup, tmp_path):
    RunWriter(tmp_path / "runs", "a", (OPEN,)).close()
    for dry in ((), ("--dry-run",)):
        answer = trueup("train", "--resume", *dry, "--json")
        assert (answer.code, answer.error["kind"]) == (2, "checkpoint")
        assert answer.err.startswith("the newest run is runs/a\n")


def words_of_the_environment() -> tuple[str, ...]:
    settings = config.load("", [OPEN])
    environment = build(settings, NoSandbox())
    try:
        return environment.vocabulary()
    finally:
        environment.close()


@pytest.fixture
def model_without_weights(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    build_tokenizer(words_of_the_environment(), directory)
    tiny_config(len(words_of_the_environment()) + len(SPECIALS)).save_pretrained(directory)
    (directory / "model.safetensors").write_bytes(b"these are no weights")
    return directory


def test_an_unreadable_model_is_refused_before_the_run_begins(trueup, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    answer = trueup("train", "model.path=model", OPEN, "--json")
    assert (answer.code, answer.error["kind"]) == (2, "checkpoint")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_fault_exits_3_with_its_cause_its_logs_and_a_report(trueup, model_without_weights):
    answer = trueup("train", f"model.path={model_without_weights}", OPEN, *SMALL, "--json")
    assert answer.code == 3
    assert answer.error["kind"] in ("fault", "engine", "checkpoint")
    message, *notes = [line for line in answer.err.splitlines() if not line.startswith("tiny-")]
    assert message.startswith("error: ")
    assert notes == ["logs:   runs/tiny-async-1/logs", "report: runs/tiny-async-1/report.html"]
    assert list(Path("runs/tiny-async-1/logs").iterdir())
    assert Path("runs/tiny-async-1/report.html").is_file()


@pytest.mark.slow
def test_a_run_is_trained_audited_reported_and_continued(trueup, tmp_path):
    answer = trueup("train", *SMALL, OPEN, "--json")
    assert answer.code == 0
    assert answer.out.count("\n") == 1
    assert answer.json.keys() == SUMMARY
    assert (answer.json["run"], answer.json["steps"]) == ("tiny-async-1", 1)
    assert answer.json["episodes_trained"] <= 4 <= answer.json["episodes_launched"]
    assert Path("runs/tiny-async-1/report.html").is_file()
    manifest = json.loads(Path("runs/tiny-async-1/manifest.json").read_text())
    assert manifest["command"][:2] == ["trueup", "train"]
    assert trueup("audit", "runs/tiny-async-1").code == 0

    again = trueup("train", "--resume")
    assert again.code == 2
    assert "train.steps" in again.err
    rehearsed = trueup("train", "--resume", "--dry-run", "train.steps=2", "--json").json
    assert (rehearsed["first_step"], rehearsed["steps"]) == (1, 2)

    answer = trueup("train", "--resume", "train.steps=2")
    assert answer.code == 0
    assert "next:   trueup audit runs/tiny-async-1" in answer.out
    assert trueup("report", "runs/tiny-async-1", "--json").json["steps"] == 2
    assert trueup("audit", "runs/tiny-async-1", "--json").json == {"ok": True, "violations": []}
