from typing import Any

import pytest

from support.embedded import request
from trueup.engines.requests import demand_sound
from trueup.errors import EngineFault


@pytest.mark.parametrize(
    ("prompt", "options", "rule"),
    [
        ([], {}, "at least 1 token"),
        ([40], {}, r"prompt_ids must be in \[0, 40\), got 40"),
        ([3, -1], {}, r"prompt_ids must be in \[0, 40\), got -1"),
        ([1], {"temperature": 0.0}, "sampling"),
        ([1], {"temperature": float("nan")}, "sampling"),
        ([1], {"top_p": 0.0}, "sampling"),
        ([1], {"top_p": 1.5}, "sampling"),
        ([1], {"max_tokens": 0}, "sampling"),
        ([1], {"forced": [1]}, "only samples"),
        ([1], {"forced": [40]}, "forced_ids must be in"),
    ],
)
def test_a_request_that_no_model_can_serve_is_refused(
    prompt: list[int], options: dict[str, Any], rule: str
) -> None:
    with pytest.raises(EngineFault, match=rule):
        demand_sound(request("a", prompt, **{"max_tokens": 1} | options), vocab_size=40)


def test_a_turn_may_fill_the_context_but_no_more() -> None:
    demand_sound(request("a", [1, 2], 6), vocab_size=40, positions=8)
    with pytest.raises(EngineFault, match="between 1 and 8 tokens"):
        demand_sound(request("a", [1, 2], 7), vocab_size=40, positions=8)


def test_forced_ids_are_as_many_as_max_tokens() -> None:
    demand_sound(request("a", [1], 2, forced=[3, 4]), vocab_size=40, forces=True)
    with pytest.raises(EngineFault, match=r"max_tokens \(2\) in number, got 1"):
        demand_sound(request("a", [1], 2, forced=[3]), vocab_size=40, forces=True)
