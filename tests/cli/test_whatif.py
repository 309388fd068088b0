import json
import random

import pytest

from support.simulated_run import simulate
from trueup.corrections.table import PRESETS


@pytest.fixture
def dump(tmp_path):
    """Eight episodes of four tokens, target and behaviour .2 nats apart in either direction."""
    random.seed(0)
    rows = []
    for index in range(8):
        target = [-1.0 - random.random() for _ in range(4)]
        row = {
            "step": index // 4,
            "input": "q",
            "score": float(index % 2),
            "old_log_probs": target,
            "rollout_log_probs": [x + random.choice([-0.2, 0.2]) for x in target],
            "response_mask": [1, 1, 1, 1],
        }
        rows.append(json.dumps(row) + "\n")
    path = tmp_path / "dump.jsonl"
    path.write_text("".join(rows))
    return path


def test_a_dump_is_compared_and_a_preset_recommended_with_its_reason(trueup, dump):
    answer = trueup("whatif", "dump.jsonl")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert lines[0] == "dump.jsonl (verl): 32 action tokens, 8 episodes, 2 step batches"
    assert lines[1].startswith("gap: mean |d| 0.2 nats; median 0.2, max 0.2; raw ESS 0.9")
    first_words = [line.split()[0] for line in lines if line.strip()]
    for name in PRESETS:
        assert first_words.count(name) == 2 or f"refused: {name}: " in answer.out
    assert "recommended: tis. mean |d| is 0.2 nats and the raw token ratios keep 9" in answer.out
    assert "missing: no weight versions: staleness and engine cannot be told apart" in answer.out
    assert "missing: no hidden states: " in answer.out


def test_the_object_for_programs_holds_all_of_it(trueup, dump):
    found = trueup("whatif", "dump.jsonl", "--json", "--presets", "none, tis", "--steps", "1:").json
    assert found.keys() == {
        "path",
        "format",
        "steps",
        "facts",
        "presets",
        "refused",
        "recommendation",
        "missing",
        "notes",
    }
    assert (found["path"], found["format"], found["steps"]) == ("dump.jsonl", "verl", [1])
    assert [row["preset"] for row in found["presets"]] == ["none", "tis"]
    assert found["presets"][0]["second"] == 1.0
    assert found["facts"]["tokens"] == 16
    assert found["recommendation"].keys() == {"preset", "reason", "fixes", "cautions"}


def test_a_run_is_read_as_a_run(trueup, tmp_path):
    simulate(tmp_path / "runs", name="a", steps=3)
    found = trueup("whatif", "runs/a", "--json").json
    assert (found["format"], found["steps"]) == ("run", [0, 1, 2])


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--steps", "3"), "--steps"),
        (("--steps", "3:3"), "--steps"),
        (("--steps", "a:b"), "--steps"),
        (("--steps", "7:"), "--steps"),
        (("--presets", "tiss"), "correction.preset"),
        (("--format", "slime"), "--format"),
    ],
)
def test_wrong_usage_is_told_by_name(trueup, dump, words, field):
    answer = trueup("whatif", "dump.jsonl", *words, "--json")
    assert (answer.code, answer.error["field"]) == (2, field)


def test_a_dump_that_cannot_be_judged_is_refused(trueup, tmp_path):
    (tmp_path / "7.jsonl").write_text('{"input": "q", "output": "a", "score": 1.0, "step": 7}\n')
    answer = trueup("whatif", "7.jsonl", "--json")
    assert (answer.code, answer.error["kind"]) == (3, "data")
    assert answer.error["field"] == "episode 7.jsonl[0], rollout_log_probs"
    answer = trueup("whatif", "absent", "--json")
    assert (answer.code, answer.error["kind"]) == (2, "usage")
