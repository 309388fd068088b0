"""A real vLLM server for tests, one per process and kind; and weights published where it reads."""

import atexit
import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.embedded import tiny
from trueup.config import EngineConfig
from trueup.engines.vllm.build import start
from trueup.engines.vllm.client import HttpClient
from trueup.engines.vllm.engine import VllmEngine, VllmOptions
from trueup.engines.vllm.server import Server, interpreter
from trueup.errors import ConfigError
from trueup.models.load import save_model, state_tensors
from trueup.sync.shared_memory import SharedMemoryTransport
from trueup.types import WeightManifest

ASKED_FOR = "TRUEUP_TEST_VLLM"
SHAPE = {
    # Small, but not so fast that turns are over before an update comes.
    "num_hidden_layers": 8,
    # The smallest that vLLM's attention on a CPU takes; a head tied to the embedding.
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": True,
}


def model(seed: int = 0) -> Any:
    """A random model that vLLM can serve."""
    return tiny("llama", seed=seed, **SHAPE)


def skip_without_vllm() -> None:
    """A server takes half a minute to start: only where it is asked for."""
    if os.environ.get(ASKED_FOR) != "1":
        pytest.skip("make test-vllm runs this")
    try:
        interpreter()
    except ConfigError as error:
        pytest.skip(str(error))


@functools.cache
def server(directory: Path | None = None, **config: Any) -> Server:
    """A server for the model in a directory, or for `model()`; it lives as long as this process."""
    import tempfile

    skip_without_vllm()
    if directory is None:
        directory = Path(tempfile.mkdtemp(prefix="trueup-test-model-"))
        save_model(model(), directory)
    running = start(EngineConfig(kind="vllm", **config), directory)
    atexit.register(running.kill)
    return running


def engine(running: Server, **options: Any) -> VllmEngine:
    """An adapter to a server that survives it."""
    client = HttpClient("http://vllm", socket=str(running.socket), why_ended=running.why_ended)
    given = {"engine_id": "e", "epoch": 3, "precision": "float32", **options}
    return VllmEngine(client, VllmOptions(**given))


def published(root: Path, models: Sequence[Any]) -> list[WeightManifest]:
    """Versions 1, 2, ... in shared memory."""
    transport = SharedMemoryTransport(root)
    atexit.register(transport.close)
    return [transport.publish(i, state_tensors(m)) for i, m in enumerate(models, 1)]


def torn(manifest: WeightManifest) -> WeightManifest:
    """A version whose tensors are not what its manifest says."""
    return replace(manifest, digest="0" * 16)
