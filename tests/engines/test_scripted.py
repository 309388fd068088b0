"""What the scripted engine adds to the contract: scripts, versions, delays, failures."""

import asyncio
import subprocess
import sys
from array import array
from dataclasses import replace

import pytest

from support.embedded import request
from trueup.engines.scripted import Reply, ScriptedEngine
from trueup.errors import DataError, EngineFault
from trueup.types import GenerateRequest, KVState, WeightManifest

V4 = WeightManifest(
    version=4, transport="none", location="", digest="d4", tensors=(), nbytes=0, n_changed=0
)


def answer(engine: ScriptedEngine, asked: GenerateRequest):
    async def main():
        await engine.load(V4)
        return await engine.generate(asked)

    return asyncio.run(main())


def test_a_table_answers_by_prompt() -> None:
    engine = ScriptedEngine({(1, 2): Reply(token_ids=(7, 3), logps=(-0.5, -0.25))})
    said = answer(engine, request("a", [1, 2], 5, stop_ids=(3,)))
    assert (said.token_ids, said.logps) == (array("i", [7, 3]), array("f", [-0.5, -0.25]))


def test_a_prompt_that_is_not_in_the_table_is_a_fault() -> None:
    with pytest.raises(EngineFault, match="script"):
        answer(ScriptedEngine({}), request("a", [1, 2]))


def test_a_version_can_arrive_at_any_token() -> None:
    reply = Reply(token_ids=range(5), logps=[-1.0] * 5, versions={2: 5, 4: 6})
    said = answer(ScriptedEngine(lambda _: reply), request("a", [1, 2, 3], 5))
    assert [(s.start, s.stop, s.version, s.kv) for s in said.spans] == [
        (0, 2, 4, KVState.FRESH),
        (2, 4, 5, KVState.RECOMPUTED),
        (4, 5, 6, KVState.RECOMPUTED),
    ]
    # 3 prompt ids and all samples but the last, at each of the two swaps.
    assert said.tokens_recomputed == (3 + 1) + (3 + 3)


def test_a_version_before_the_first_token_is_the_only_one() -> None:
    reply = Reply(token_ids=range(2), logps=[-1.0] * 2, versions={0: 5})
    said = answer(ScriptedEngine(lambda _: reply), request("a", [1], 2))
    assert [(s.start, s.stop, s.version) for s in said.spans] == [(0, 2, 5)]


def test_a_scripted_fault_is_raised_and_the_session_can_go_on() -> None:
    replies = iter(
        [
            Reply(token_ids=(), logps=(), fault=EngineFault("lost", field="engine")),
            Reply(token_ids=(1,), logps=(-1.0,)),
        ]
    )

    async def main() -> None:
        engine = ScriptedEngine(lambda _: next(replies))
        await engine.load(V4)
        with pytest.raises(EngineFault, match="lost"):
            await engine.generate(request("a", [1], 1))
        assert len((await engine.generate(request("a", [1], 1))).token_ids) == 1

    asyncio.run(main())


def test_a_reply_that_ends_too_soon_is_an_error_of_the_script() -> None:
    engine = ScriptedEngine(lambda _: Reply(token_ids=(1,), logps=(-1.0,)))
    with pytest.raises(DataError, match="max_tokens"):
        answer(engine, request("a", [1], 2))


def test_calls_are_recorded_in_order() -> None:
    asked = request("a", [1], 1)

    async def main() -> ScriptedEngine:
        engine = ScriptedEngine(lambda _: Reply(token_ids=(1,), logps=(-1.0,)))
        await engine.load(V4)
        await engine.generate(asked)
        await engine.load(replace(V4, version=5))
        await engine.release("a")
        await engine.close()
        return engine

    engine = asyncio.run(main())
    assert engine.calls == [
        ("load", V4),
        ("generate", asked),
        ("load", replace(V4, version=5)),
        ("release", "a"),
        ("close", None),
    ]


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, trueup.engines.scripted; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
