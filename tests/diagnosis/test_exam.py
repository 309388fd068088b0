import asyncio

import pytest

from support.blind import examined, questions
from support.embedded import Publisher, tiny
from trueup.diagnosis.exam import Examiner, Questions, Release, Wave
from trueup.engines.embedded.engine import EmbeddedEngine
from trueup.errors import DataError
from trueup.models.load import state_tensors


def test_every_wave_has_the_versions_that_it_should():
    case, _ = examined(seed=10)
    seen = {wave: set() for wave in Wave}
    pairs = zip(case.answers.waves, case.rollouts.completions, strict=True)
    for wave, completion in pairs:
        seen[wave] |= {span.version for span in completion.spans}
    assert seen[Wave.BEFORE] == {1}
    assert seen[Wave.ACROSS] == {1, 2}
    assert seen[Wave.AFTER] == seen[Wave.AGAIN] == {2}
    # What a cache may hold of a second turn: all of the first but its last sample.
    again = [i for i, wave in enumerate(case.answers.waves) if wave is Wave.AGAIN]
    first = case.rollouts.completions[0]
    held = len(case.rollouts.requests[0].prompt_ids) + len(first.token_ids) - 1
    assert case.answers.cached[again[0]] == held


def ask(slots, asked):
    model, publisher = tiny(), Publisher()
    engine = EmbeddedEngine(publisher.core(model, slots=slots))
    tensors = state_tensors(model)
    old, new = (Release.of(publisher.publish(model), tensors) for _ in range(2))

    async def main():
        try:
            return await Examiner(engine, old, new, asked).first()
        finally:
            await engine.close()

    return asyncio.run(main())


def test_one_slot_is_enough():
    answers = ask(1, questions(rows=3, max_tokens=4, across_tokens=8))
    assert answers.waves.count(Wave.BEFORE) == answers.waves.count(Wave.AFTER) == 3
    assert answers.waves.count(Wave.ACROSS) == 1
    assert Wave.AGAIN not in answers.waves


def test_without_a_prompt_nothing_can_be_asked():
    with pytest.raises(DataError, match="at least one"):
        ask(4, Questions(prompts=[]))
