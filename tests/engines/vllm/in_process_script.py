"""Run by vLLM's interpreter: one turn, an update and another turn without a server; prints JSON."""

import asyncio
import json
import sys
from array import array
from pathlib import Path

from trueup.config import EngineConfig
from trueup.engines.vllm.build import arguments
from trueup.engines.vllm.engine import VllmEngine, VllmOptions
from trueup.engines.vllm.in_process import InProcessClient
from trueup.sync.manifest import manifest_from_dict
from trueup.types import GenerateRequest, SamplingParams


async def main(model: str, *manifests: str) -> None:
    config = EngineConfig(kind="vllm", slots=4)
    client = InProcessClient(arguments(config, Path(model)))
    engine = VllmEngine(client, VllmOptions(engine_id="e", epoch=0, precision="float32"))
    found = []
    for manifest in manifests:
        receipt = await engine.load(manifest_from_dict(json.loads(manifest)))
        sampling = SamplingParams(max_tokens=8, stop_ids=(), key=(1,))
        said = await engine.generate(
            GenerateRequest(session="a", prompt_ids=array("i", [1, 2, 3]), sampling=sampling)
        )
        found.append(
            {
                "ids": list(said.token_ids),
                "logps": list(said.logps),
                "versions": [span.version for span in said.spans],
                "digest": receipt.digest,
            }
        )
    print(json.dumps(found))  # noqa: T201
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
