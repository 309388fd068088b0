import asyncio

from support.embedded import request
from support.lying import Rig
from trueup.engines.base import Engine

PROMPT = [1, 2, 3, 4]


def test_a_label_is_the_version_loaded_before_and_the_engine_knows_its_own():
    async def script(engine: Engine) -> None:
        versions = []
        for seed in (1, 2, 3):
            await engine.load(rig.publish(seed))
            said = await engine.generate(request(f"s{seed}", PROMPT))
            versions.append(((await engine.info()).version, said.spans[0].version))
        assert versions == [(1, 1), (2, 1), (3, 2)]

    rig = Rig("label_off_by_one")
    rig.play(script)


def test_a_reply_over_a_load_has_the_version_of_its_arrival():
    async def script(engine: Engine) -> None:
        await engine.load(rig.publish(1))
        task = asyncio.create_task(engine.generate(request("a", PROMPT, 240)))
        for _ in range(10):
            await asyncio.sleep(0.001)
        receipt = await engine.load(rig.publish(2))
        said = await task
        decoded_before = receipt.tokens_recomputed - len(PROMPT) + 1
        assert 0 < decoded_before < 240  # sampled by version 1
        assert [(s.start, s.stop, s.version) for s in said.spans] == [(0, 240, 2)]

    rig = Rig("label_by_client")
    rig.play(script)


def test_a_quantisation_that_does_nothing_is_claimed_everywhere():
    async def script(engine: Engine) -> None:
        await engine.load(rig.publish(1))
        said = await engine.generate(request("a", PROMPT))
        assert (await engine.info()).precision == "float32+int8"
        assert [span.precision for span in said.spans] == ["float32+int8"]
        replies.append(said)

    replies = []
    rig = Rig("noop_quantisation")
    rig.play(script)
    truth = honest_reply()
    assert (replies[0].token_ids, replies[0].logps) == (truth.token_ids, truth.logps)


def honest_reply():
    replies = []

    async def script(engine: Engine) -> None:
        await engine.load(rig.publish(1))
        replies.append(await engine.generate(request("a", PROMPT)))

    rig = Rig()
    rig.play(script)
    return replies[0]
