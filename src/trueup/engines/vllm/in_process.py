"""vLLM's engine without its server: the same adapter and extension, inside vLLM's environment.

vLLM's engine loop and workers still are processes of their own; what falls away is HTTP. The
responses have the form of `/inference/v1/generate`, so that one reader (`reply`) judges both.

Example:
    `VllmEngine(InProcessClient(arguments(config, model)), options)`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter
from vllm import SamplingParams, TokensPrompt
from vllm.config import VllmConfig
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from trueup.engines.vllm.facts import ServerFacts, facts_of


class InProcessClient:
    """Implements `Client` over `AsyncLLM`; must be made where an event loop runs.

    Args:
        arguments: Of vLLM's engine, as `build.arguments` gives them.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        """Start the engine; blocks for as long as a server would take."""
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        parsed = AsyncEngineArgs.from_cli_args(parser.parse_args(list(arguments)))
        self._llm = AsyncLLM.from_engine_args(parsed)

    async def facts(self) -> ServerFacts:
        """See `Client.facts`."""
        config = self._llm.vllm_config
        return facts_of(TypeAdapter(VllmConfig).dump_python(config, mode="json", fallback=str))

    async def generate(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Client.generate`."""
        kind = RequestOutputKind.FINAL_ONLY
        last: Any = None
        async for output in self._llm.generate(
            TokensPrompt(prompt_token_ids=request["token_ids"], cache_salt=request["cache_salt"]),
            SamplingParams(**request["sampling_params"], output_kind=kind),
            request["request_id"],
        ):
            last = output
        return _response(last)

    async def abort(self, request_id: str) -> None:
        """See `Client.abort`."""
        await self._llm.abort(request_id)

    async def pause(self, mode: str) -> None:
        """See `Client.pause`."""
        await self._llm.pause_generation(mode=mode, clear_cache=False)

    async def resume(self) -> None:
        """See `Client.resume`."""
        await self._llm.resume_generation()

    async def update(self, version: int) -> None:
        """See `Client.update`."""
        await self._llm.start_weight_update()
        await self._llm.update_weights(
            WeightTransferUpdateRequest(update_info={"version": version})
        )
        await self._llm.finish_weight_update(str(version))

    async def reset_cache(self, *, running: bool) -> bool:
        """See `Client.reset_cache`."""
        return bool(await self._llm.reset_prefix_cache(running))

    async def weight_version(self) -> str:
        """See `Client.weight_version`."""
        return str(await self._llm.get_weight_version())

    async def call(self, method: str, *arguments: str) -> Mapping[str, Any]:
        """See `Client.call`."""
        answers = await self._llm.collective_rpc(method, args=arguments)
        first: Mapping[str, Any] = answers[0]
        return first

    async def close(self) -> None:
        """See `Client.close`: ends the engine."""
        self._llm.shutdown()


def _response(output: Any) -> dict[str, Any]:
    """What the server would answer."""
    (choice,) = output.outputs
    ids = list(choice.token_ids)
    content = [
        {"token_id": token, "logprob": table[token].logprob}
        for token, table in zip(ids, choice.logprobs or (), strict=True)
    ]
    spans = [
        {"version": span.version, "start": span.start, "end": span.end}
        for span in choice.weight_versions or ()
    ]
    return {
        "choices": [
            {
                "token_ids": ids,
                "logprobs": {"content": content},
                "finish_reason": choice.finish_reason,
                "weight_versions": spans,
            }
        ],
        "usage": {"prompt_tokens_details": {"cached_tokens": output.num_cached_tokens}},
    }
