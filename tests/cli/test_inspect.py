import sqlite3

import pytest

from support.recorded import Story, record
from support.simulated_run import simulate
from trueup.cli.inspect import verdicts
from trueup.records.audit import MEANINGS, Violation
from trueup.records.directory import RunDirectory
from trueup.scheduling import Rules

RULES = Rules(groups_per_step=2, samples_per_group=3, slots=(4,), staleness=1, retries=1)


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return record(tmp_path / "runs", Story(rules=RULES, steps=2))


def damage(run: RunDirectory) -> None:
    db = sqlite3.connect(run.ledger)
    with db:
        db.execute("UPDATE events SET version = version + 1 WHERE seq = 5")
    db.close()


def test_an_honest_run_passes_with_a_line_per_invariant(trueup, run):
    answer = trueup("audit", "runs/run")
    assert answer.code == 0
    head, *lines = answer.out.splitlines()
    assert head.startswith("runs/run: ")
    assert [line.split()[:2] for line in lines] == [["✓", name] for name in MEANINGS]
    answer = trueup("audit", "runs/run", "--json")
    assert (answer.code, answer.json) == (0, {"ok": True, "violations": []})


def test_an_altered_row_fails_the_audit(trueup, run):
    damage(run)
    answer = trueup("audit", "runs/run", "--json")
    assert answer.code == 1
    assert answer.json["ok"] is False
    violations = answer.json["violations"]
    assert all(v.keys() == {"invariant", "rows", "message"} for v in violations)
    assert any(v["invariant"] == "chain" and 5 in v["rows"] for v in violations)
    answer = trueup("audit", "runs/run")
    assert answer.code == 1
    assert "✗ chain" in answer.out


def test_what_a_malformed_ledger_leaves_unchecked_is_not_called_right():
    broken = Violation(invariant="schema", rows=(3,), message="a payload lacks `reward`")
    lines = verdicts([broken])
    assert lines[0].startswith("✓ chain")
    assert lines[1].startswith("✗ schema")
    assert lines[2].strip() == "a payload lacks `reward`"
    assert len(lines) == len(MEANINGS) + 1
    assert all(line.startswith("–") and line.endswith("(not checked)") for line in lines[3:])


def test_a_report_is_written_and_its_figures_printed(trueup, tmp_path):
    path = simulate(tmp_path / "runs", name="a", steps=4)
    answer = trueup("report", "runs/a")
    assert answer.code == 0
    assert (path / "report.html").is_file()
    assert answer.out.splitlines()[-1] == "report: runs/a/report.html"
    found = trueup("report", "runs/a", "--json").json
    assert (found["run"], found["steps"], found["ended"]) == ("a", 4, "done")
    assert found["report"] == "runs/a/report.html"


@pytest.mark.parametrize("command", ["report", "audit"])
@pytest.mark.parametrize("path", [".", "runs/absent"])
def test_a_directory_that_is_no_run_is_refused_and_left_alone(trueup, tmp_path, command, path):
    answer = trueup(command, path, "--json")
    assert (answer.code, answer.error["kind"]) == (2, "run_directory")
    assert answer.error["value"] == path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["report", "audit"])
def test_a_ledger_that_is_none_is_refused(trueup, tmp_path, command):
    (tmp_path / "run.db").write_text("not a database, and longer than a header of one" * 20)
    answer = trueup(command, ".")
    assert answer.code == 2
    assert answer.err.startswith("error: ")
    assert "Traceback" not in answer.err
