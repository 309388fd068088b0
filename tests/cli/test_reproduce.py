import json

import pytest
import typer

from trueup.cli.reproduce import finish
from trueup.experiments.base import Outcome, Table
from trueup.experiments.table import EXPERIMENTS, find

LINE = {
    "kind": "lines",
    "id": "a",
    "title": "Bias",
    "caption": "",
    "x": {"label": "σ", "scale": "log"},
    "y": {"label": "share", "scale": "log"},
    "series": [{"name": "none", "x": [0.1, 1.0], "y": [0.01, 0.5], "mark": "line"}],
    "rules": [],
}


def outcome(*differences):
    table = Table(title="Cells", head=["σ", "bias²"], rows=[["0.1", "0.012"]], note="A note.")
    return Outcome(result={"x": 1.5}, differences=differences, tables=[table], figures=[LINE])


def test_without_a_name_it_lists_the_experiments(trueup):
    answer = trueup("reproduce")
    assert answer.code == 0
    for experiment, line in zip(EXPERIMENTS, answer.out.splitlines(), strict=True):
        assert line.startswith(", ".join((experiment.name, *experiment.aliases)))
    listed = trueup("reproduce", "--json").json["experiments"]
    assert listed["estimator-table"]["aliases"] == ["13.4"]


def test_an_unknown_experiment_is_wrong_usage(trueup):
    answer = trueup("reproduce", "estimators", "--json")
    assert answer.code == 2
    assert answer.error["field"] == "experiment"
    assert "'estimator-table'" in answer.error["message"]


def test_tables_are_printed_and_the_verdict_last(capsys):
    finish(find("13.4"), outcome(), quick=True, out=None, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        "**Cells**",
        "",
        "| σ   | bias² |",
        "|-----|-------|",
        "| 0.1 | 0.012 |",
        "",
        "A note.",
        "",
        "✓ every printed digit of the source is reproduced",
    ]


def test_a_digit_that_differs_is_named_and_fails(capsys):
    with pytest.raises(typer.Exit) as ended:
        finish(find("13.4"), outcome("σ 1, none: .3"), quick=True, out=None, as_json=False)
    assert ended.value.exit_code == 1
    assert capsys.readouterr().out.splitlines()[-1] == "✗ σ 1, none: .3"


def test_as_json_everything_is_one_object(capsys):
    with pytest.raises(typer.Exit):
        finish(find("13.4"), outcome("off"), quick=True, out=None, as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "name": "estimator-table",
        "ok": False,
        "differences": ["off"],
        "quick": True,
        "result": {"x": 1.5},
    }


def test_result_and_figure_are_written_where_asked(tmp_path, capsys):
    finish(find("13.4"), outcome(), quick=False, out=tmp_path / "new", as_json=True)
    capsys.readouterr()
    assert json.loads((tmp_path / "new" / "result.json").read_text()) == {"quick": False, "x": 1.5}
    assert "Bias" in (tmp_path / "new" / "figure.svg").read_text()
