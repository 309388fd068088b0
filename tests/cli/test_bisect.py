import json
from pathlib import Path

import pytest
import torch

from trueup.models.load import load_model


@pytest.fixture
def dump(untrained, tmp_path):
    """Forty completions with true log-probs, as JSON lines, by what is done to the log-probs."""
    policy = load_model(Path(untrained))
    size = policy.config.vocab_size
    generator = torch.Generator().manual_seed(0)

    def write(change):
        rows = []
        for _ in range(40):
            ids = torch.randint(0, size, (6,), generator=generator).tolist()
            prompt = list(ids)
            logps = []
            for _ in range(8):
                with torch.no_grad():
                    table = policy(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                token = int(torch.multinomial(table.exp(), 1, generator=generator))
                logps.append(float(table[token]))
                ids.append(token)
            record = {"prompt_ids": prompt, "token_ids": ids[6:], "logps": change(logps)}
            rows.append(json.dumps({**record, "precision": "float32"}))
        path = tmp_path / "dump.jsonl"
        path.write_text("\n".join(rows) + "\n")
        return str(path)

    return write


def test_stored_completions_with_true_log_probs_are_clean(trueup, untrained, dump):
    answer = trueup("bisect", untrained, "--dtype", "float32", "--dump", dump(list), "--json")
    found = answer.json
    assert (answer.code, found["verdict"], found["cause"]) == (0, "clean", "")
    assert found["tokens"] == 320
    assert any("--before" in note for note in found["notes"])


def test_the_cause_in_stored_completions_is_named(trueup, untrained, dump):
    path = dump(lambda logps: logps[-1:] + logps[:-1])
    answer = trueup("bisect", untrained, "--dtype", "float32", "--dump", path)
    assert answer.code == 1
    assert "cause: shifted_logprobs (of the token before): " in answer.out
    assert "remedy: " in answer.out


def test_an_engine_of_this_process_is_examined_and_its_settings_turned_off(trueup, untrained):
    answer = trueup("bisect", untrained, "--threads", "1", "--json")
    found = answer.json
    assert (answer.code, found["verdict"]) == (0, "clean")
    toggles = found["toggles"]
    names = {effect["name"] for effect in toggles["one_off"]}
    assert {"bfloat16", "batch of 8", "decoding, not prefill", "prefix cache"} <= names
    total = sum(effect["delta_k3"] for effect in toggles["one_off"])
    assert toggles["all_off"]["delta_k3"] == pytest.approx(
        total + toggles["interaction_k3"], abs=1e-12
    )
    # In float32, decoded alone, nothing is left of the gap.
    assert toggles["all_off"]["k3"] < 1e-9


def test_a_line_that_is_no_completion_is_refused(trueup, untrained, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt_ids": [1]}\n')
    answer = trueup("bisect", untrained, "--dump", "bad.jsonl", "--json")
    assert (answer.code, answer.error["field"]) == (3, "bad.jsonl, line 1")
