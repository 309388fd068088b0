from typing import Any

import pytest

from trueup.engines.openai.reply import choice_of, first_position, prompt_logps, read
from trueup.errors import EngineFault
from trueup.types import FinishReason, SamplingParams

SAMPLING = SamplingParams(max_tokens=2, stop_ids=(9,))


def reply(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"finish_reason": "length"} | choice]}


def test_ids_beside_a_list_of_log_probs_are_read() -> None:
    found = read(reply(token_ids=[5, 6], logprobs={"token_logprobs": [-0.5, -1.5]}), [1], SAMPLING)
    assert list(found.token_ids) == [5, 6]
    assert list(found.logps) == [-0.5, -1.5]
    assert (found.finish, found.tokens_cached) == (FinishReason.LENGTH, 0)


def test_one_record_per_token_is_read() -> None:
    content = [
        {"id": 5, "logprob": -0.5, "top_logprobs": [{"id": 7, "logprob": -0.25}]},
        {"id": 9, "logprob": -1.5, "top_logprobs": []},
    ]
    found = reply(logprobs={"content": content}, finish_reason="stop")
    assert list(read(found, [1], SAMPLING).token_ids) == [5, 9]
    assert read(found, [1], SAMPLING).finish is FinishReason.STOP
    assert first_position(choice_of(found)) == ("5", {"5": -0.5, "7": -0.25})


def test_ids_written_as_tokens_are_read() -> None:
    logprobs = {"tokens": ["token_id:5", "token_id:6"], "token_logprobs": [-0.5, -1.5]}
    assert list(read(reply(logprobs=logprobs), [1], SAMPLING).token_ids) == [5, 6]


def test_a_stop_id_that_is_also_the_last_allowed_token_stops() -> None:
    found = reply(token_ids=[5, 9], logprobs={"token_logprobs": [-0.5, -1.5]})
    assert read(found, [1], SAMPLING).finish is FinishReason.STOP


def test_certain_tokens_behind_a_nucleus_may_all_have_log_prob_zero() -> None:
    sampling = SamplingParams(max_tokens=20, stop_ids=(), top_p=0.5)
    found = reply(token_ids=[5] * 20, logprobs={"token_logprobs": [0.0] * 20})
    assert list(read(found, [1], sampling).logps) == [0.0] * 20


def test_impossible_alternatives_are_left_out() -> None:
    logprobs = {
        "tokens": [" a"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{" the": -1.0, " b": -9999.0}],
    }
    assert first_position({"logprobs": logprobs}) == (" a", {" a": -0.5, " the": -1.0})


def test_prompt_log_probs_are_those_of_the_prompt_ids() -> None:
    listed = [None, {"2": {"logprob": -0.5}, "8": {"logprob": -0.1}}, {"3": {"logprob": -1.5}}]
    assert prompt_logps(reply(prompt_logprobs=listed), [1, 2, 3]) == [-0.5, -1.5]
    with pytest.raises(EngineFault, match="token 4"):
        prompt_logps(reply(prompt_logprobs=listed), [1, 2, 4])
    with pytest.raises(EngineFault, match="one per prompt id"):
        prompt_logps(reply(prompt_logprobs=listed), [1, 2])
