import json

import pytest


def test_a_float32_engine_is_at_the_floor_of_its_arithmetic(trueup, untrained, tmp_path):
    words = ("--dtype", "float32", "--tokens", "60", "--threads", "1", "--out", "out", "--json")
    answer = trueup("measure", untrained, *words)
    assert answer.code == 0
    found = answer.json
    assert found.keys() == {
        "model",
        "engine",
        "precision",
        "tokens",
        "completions",
        "comparisons",
        "by_probability",
        "split",
        "corrections",
        "recommendation",
        "verdict",
        "notes",
    }
    assert (found["precision"], found["tokens"], found["completions"]) == ("float32", 60, 30)
    lines = {line["name"]: line for line in found["comparisons"]}
    assert lines["fp32 trainer, batch 1 vs engine"]["abs_mean"] <= 1e-5
    assert lines["bf16 trainer, batch 1 vs engine"]["abs_mean"] > 1e-4
    assert lines["fp32 trainer vs float32"]["abs_mean"] <= 1e-5
    assert lines["fp32 trainer vs float32+int4"]["abs_mean"] > 1e-3
    assert {"decode: batch 1 vs 10", "decode: batch 1 vs 30"} <= lines.keys()
    assert found["recommendation"]["preset"] == "none"
    assert found["split"]["engine"]["share"] == pytest.approx(1.0)
    written = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [figure["id"] for figure in written["figures"]] == [
        "mismatch",
        "mismatch-by-probability",
    ]
    assert (tmp_path / "out" / "figure.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--engine", "sglang"), "engine.kind"),
        (("--quantize", "int3"), "engine.quantize"),
        (("--prompts", "missing.txt"), "--prompts"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_its_name(trueup, untrained, words, field):
    answer = trueup("measure", untrained, *words, "--json")
    assert (answer.code, answer.error["field"]) == (2, field)


def test_a_model_that_is_not_there_is_refused(trueup):
    answer = trueup("measure", "no-such-model", "--json")
    assert (answer.code, answer.error["field"]) == (2, "model.path")
