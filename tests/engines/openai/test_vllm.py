"""A real vLLM server as a foreign one: somebody else has set its weights."""

import asyncio
import functools
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.embedded import VOCABULARY, logps, reference_logps, request
from support.forward import forwarding
from trueup.engines.http import Address, JsonClient
from trueup.engines.openai.engine import OpenAIEngine
from trueup.engines.openai.semantics import LogprobMode
from trueup.types import FinishReason, WeightManifest

pytestmark = pytest.mark.extra

PROMPT = [1, 2, 3, 4]


@functools.cache
def sharp() -> Any:
    """A random model whose probable tokens differ enough for measuring the log-prob mode."""
    from support.vllm import model

    made = model()
    with torch.no_grad():
        made.model.norm.weight.mul_(8)
    return made


@functools.cache
def version() -> WeightManifest:
    """The weights of `sharp`, where a server of ours reads them."""
    from support.vllm import published

    root = Path(tempfile.mkdtemp(prefix="trueup-test-run-"))
    return published(root, [sharp()])[0]


def play(script: Callable[[OpenAIEngine], Awaitable[None]]) -> None:
    import support.vllm

    support.vllm.skip_without_vllm()

    running = support.vllm.server(slots=8)

    async def main(url: str) -> None:
        owner = support.vllm.engine(running)
        await owner.load(version())
        await owner.close()
        engine = OpenAIEngine(
            JsonClient(Address.parse(url)),
            engine_id="e",
            slots=8,
            precision="float32",
            vocab_size=VOCABULARY,
        )
        await script(engine)
        await engine.close()

    with forwarding(running.socket) as url:
        asyncio.run(main(url))


def test_processed_log_probs_are_found_by_measuring() -> None:
    async def script(engine: OpenAIEngine) -> None:
        assert await engine.connect() == LogprobMode(temperature=True, top_p=True, top_k=True)

    play(script)


def test_log_probs_are_those_of_a_full_forward_at_the_temperature() -> None:
    async def script(engine: OpenAIEngine) -> None:
        said = await engine.generate(request("a", PROMPT, 20, temperature=0.7))
        expected = reference_logps(sharp(), PROMPT, said.token_ids.tolist(), 0.7)
        assert logps(said) == pytest.approx(expected, abs=2e-4)

    play(script)


def test_a_turn_ends_at_the_first_stop_id_and_keeps_it() -> None:
    async def script(engine: OpenAIEngine) -> None:
        whole = (await engine.generate(request("a", PROMPT, 16))).token_ids.tolist()
        stop = whole[5]
        said = await engine.generate(request("a", PROMPT, 16, stop_ids=(stop,)))
        assert said.finish is FinishReason.STOP
        assert said.token_ids.tolist() == whole[: whole.index(stop) + 1]

    play(script)


def test_a_prefill_scores_what_was_sampled() -> None:
    async def script(engine: OpenAIEngine) -> None:
        said = await engine.generate(request("a", PROMPT, 16))
        scored = await engine.score([*PROMPT, *said.token_ids])
        assert scored[len(PROMPT) - 1 :] == pytest.approx(list(said.logps), abs=2e-4)

    play(script)


def test_an_abandoned_turn_does_not_hold_the_server_up() -> None:
    async def script(engine: OpenAIEngine) -> None:
        task = asyncio.create_task(engine.generate(request("a", PROMPT, 200)))
        await asyncio.sleep(0.2)
        await engine.release("a")
        assert (await task).finish is FinishReason.ABORT
        assert len((await engine.generate(request("a", PROMPT, 4))).token_ids) == 4

    play(script)
