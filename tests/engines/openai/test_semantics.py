import asyncio
from collections.abc import Mapping

import pytest

from trueup.engines.openai.semantics import LogprobMode, measure
from trueup.errors import EngineFault
from trueup.types import SamplingParams

PLAIN = {"a": -0.5, "b": -2.5, "c": -3.5}
"""Mean -13/6: (5/3)² + (1/3)² + (4/3)² = 4.67 nats² apart, enough in one prompt."""


def measured(power: float) -> LogprobMode:
    """Of a server whose log-probs are `power` times as far apart when it is cold."""

    async def observe(
        prompt: list[int], sampling: SamplingParams
    ) -> tuple[str, Mapping[str, float]]:
        assert all(0 <= token < 50 for token in prompt)
        if sampling.top_k == 1:
            return "a", {"a": 0.0}
        if sampling.top_p < 1:
            return "a", {"a": PLAIN["a"]}
        factor = power if sampling.temperature != 1 else 1.0
        return "a", {token: factor * logp - 0.01 for token, logp in PLAIN.items()}

    return asyncio.run(measure(observe, vocab_size=50))


@pytest.mark.parametrize(("power", "processed"), [(4.0, True), (3.5, True), (1.0, False)])
def test_the_mode_follows_from_how_differences_scale(power: float, processed: bool) -> None:
    assert measured(power) == LogprobMode(temperature=processed, top_p=False, top_k=True)


@pytest.mark.parametrize("power", [2.0, 0.0, -1.0, 16.0])
def test_log_probs_that_follow_no_rule_are_refused(power: float) -> None:
    with pytest.raises(EngineFault, match="4 times as far apart"):
        measured(power)
