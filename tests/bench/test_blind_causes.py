"""A short version of bench/blind_causes.py, on seeds that it does not use."""

import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import blind_causes as bench  # noqa: E402

from trueup.engines.lying import FAULTS  # noqa: E402


def test_a_third_of_the_runs_is_sound_and_the_others_go_through_the_kit():
    runs = bench.plans(30, 0)
    counts = Counter(run.fault for run in runs)
    assert counts.pop(bench.CLEAN) == 10
    assert set(counts) == set(FAULTS)
    assert max(counts.values()) <= 2
    assert runs == bench.plans(30, 0)
    assert runs != bench.plans(30, 1)


def test_the_figures_count_what_is_right_and_what_is_false():
    run = {f: bench.Run(seed=0, fault=f, dtype="float32", quantize="none") for f in ("none", "a")}
    rows = [
        (run["none"], "none"),
        (run["none"], "stale_head"),
        (run["none"], "not separable"),
        (run["a"], "a"),
        (run["a"], "none"),
    ]
    assert bench.figures(rows) == {"runs": 5, "named_right": 2, "false_on_clean": 1}


def test_the_page_holds_the_result_of_thirty_runs():
    text = bench.PAGE.read_text(encoding="utf-8")
    assert "0 faults named on 10 sound engines" in text
    assert int(text.split("**")[1].split()[0]) >= 28


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hidden_faults_are_named_and_nothing_on_sound_engines():
    rows = [(run, bench.answer(bench.play(run)[0])) for run in bench.plans(8, 77)]
    found = bench.figures(rows)
    assert found["false_on_clean"] == 0
    assert found["named_right"] >= 7
