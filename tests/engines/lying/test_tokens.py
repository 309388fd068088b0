import math

import pytest

from support.embedded import request
from support.lying import Rig
from trueup.engines.base import Engine
from trueup.types import FinishReason

PROMPT = [1, 2, 3, 4]
NEVER = (38,)
"""A stop token that the replies below do not contain; their keys are fixed."""


def reply(rig: Rig, asked):
    said = []

    async def script(engine: Engine) -> None:
        await engine.load(rig.publish(1))
        said.append(await engine.generate(asked))

    rig.play(script)
    return said[0]


def test_a_cut_reply_ends_with_a_stop_token_that_was_not_sampled():
    asked = request("a", PROMPT, 9, stop_ids=NEVER)
    said, honest = reply(Rig("appended_eos"), asked), reply(Rig(), asked)
    assert honest.finish is FinishReason.LENGTH
    assert said.finish is FinishReason.STOP
    assert [*said.token_ids] == [*honest.token_ids[:8], 38]
    assert [*said.logps] == [*honest.logps[:8], 0.0]
    assert [(s.start, s.stop) for s in said.spans] == [(0, 9)]


def test_a_reply_that_stops_by_itself_is_left_alone():
    asked = request("a", PROMPT, 60, stop_ids=tuple(range(0, 40, 2)))
    said, honest = reply(Rig("appended_eos"), asked), reply(Rig(), asked)
    assert honest.finish is FinishReason.STOP
    assert (said.token_ids, said.logps) == (honest.token_ids, honest.logps)


@pytest.mark.parametrize(
    "asked", [request("a", PROMPT, 9), request("a", PROMPT, 2, forced=[5, 6], stop_ids=NEVER)]
)
def test_nothing_is_appended_where_no_stop_is_asked_or_tokens_are_given(asked):
    said, honest = reply(Rig("appended_eos"), asked), reply(Rig(), asked)
    assert (said.token_ids, said.logps, said.finish) == (
        honest.token_ids,
        honest.logps,
        honest.finish,
    )


def test_shifted_log_probs_are_those_of_the_token_before():
    asked = request("a", PROMPT, 5)
    said, honest = reply(Rig("shifted_logprobs"), asked), reply(Rig(), asked)
    a, b, c, d, e = honest.logps
    assert [*said.logps] == [e, a, b, c, d]
    assert said.token_ids == honest.token_ids


@pytest.mark.parametrize(("seed", "lost"), [(0, 0.0), (1, math.nan)])
def test_dropped_log_probs_are_a_share_and_the_rest_is_true(seed, lost):
    asked = request("a", PROMPT, 200)
    said, honest = reply(Rig("dropped_logprobs", seed), asked), reply(Rig(), asked)
    gone = [i for i, x in enumerate(said.logps) if math.isnan(x) or x == 0.0]
    assert 2 <= len(gone) <= 60  # of 200 at 5, 10 or 20 %, with a fixed seed
    assert all(math.isnan(said.logps[i]) is math.isnan(lost) for i in gone)
    kept = set(range(200)) - set(gone)
    assert all(said.logps[i] == honest.logps[i] for i in kept)
    assert said.token_ids == honest.token_ids
