"""Make a vLLM engine from the configuration of a run: refuse, describe, start, wait."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trueup.config import EngineConfig
from trueup.engines.vllm import wire
from trueup.engines.vllm.client import HttpClient
from trueup.engines.vllm.engine import VllmEngine, VllmOptions
from trueup.engines.vllm.server import Server, private_directory
from trueup.errors import ConfigError
from trueup.types import WeightManifest

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_VARIABLE = "TRUEUP_VLLM_TOKEN"
"""Environment variable with the bearer token of a server started elsewhere."""

_FRONT = ("--tokens-only", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log")
"""What the HTTP server is asked for beside its engine: token ids, and how many were cached."""


def build(
    config: EngineConfig,
    *,
    model: Path,
    engine_id: str,
    epoch: int,
    fetch: Callable[[WeightManifest], dict[str, Tensor]],
    digest: Callable[[Mapping[str, Tensor]], str],
    paced: bool,
) -> VllmEngine:
    """See `engines.table.Build`; workers fetch and digest by themselves, where the weights are.

    Raises:
        ConfigError: vLLM cannot do what is asked for, or is not there.
        EngineFault: The server did not start.
    """
    refuse(config, paced=paced)
    quantize: Literal["none", "int8"] = "int8" if config.quantize == "int8" else "none"
    options = VllmOptions(
        engine_id=engine_id,
        epoch=epoch,
        precision=config.precision,
        quantize=quantize,
        kv_mode=config.kv_mode,
        expected=shapes(model),
    )
    if config.url:
        token = os.environ.get(TOKEN_VARIABLE, "")
        return VllmEngine(HttpClient(config.url, token=token), options)
    server = start(config, model)
    client = HttpClient("http://vllm", socket=str(server.socket), why_ended=server.why_ended)
    return VllmEngine(client, options, kill=server.kill, pid=server.pid)


def start(config: EngineConfig, model: Path) -> Server:
    """Start a server for a model's architecture, with random weights, and wait for it.

    Raises:
        ConfigError: There is no vLLM here.
        EngineFault: It did not start.
    """
    directory = private_directory()
    if config.quantize == "int8":
        from trueup.engines.vllm import int8

        model = int8.described(model, directory / "model")
    given = [*arguments(config, model), *_FRONT]
    server = Server(given, threads=config.threads, directory=directory)
    server.wait()
    return server


def refuse(config: EngineConfig, *, paced: bool) -> None:
    """Refuse what vLLM cannot do.

    Raises:
        ConfigError: Names what it can.
    """
    if config.quantize not in wire.QUANTIZATIONS:
        raise ConfigError(
            field="engine.quantize",
            rule=f"one of {', '.join(wire.QUANTIZATIONS)} on vLLM",
            value=config.quantize,
        )
    if config.float32_head:
        raise ConfigError(field="engine.float32_head", rule="false on vLLM", value=True)
    if paced:
        raise ConfigError(
            field="train.deterministic",
            rule="false on vLLM, which cannot be driven token by token",
            value=True,
        )


def arguments(config: EngineConfig, model: Path) -> list[str]:
    """Of vLLM's engine: what a behaviour policy needs, and nothing that compiles or guesses."""
    given = [
        *("--model", str(model), "--load-format", "dummy", "--dtype", config.dtype),
        *("--max-num-seqs", str(config.slots), "--max-model-len", "auto"),
        # The distribution that was really sampled from; vLLM's default ignores the temperature.
        *("--logprobs-mode", "processed_logprobs"),
        *("--worker-extension-cls", wire.EXTENSION, "--logits-processors", wire.PROCESSOR),
        *("--weight-transfer-config", f'{{"backend": "{wire.BACKEND}"}}'),
        *("--skip-tokenizer-init", "--enforce-eager", "--generation-config", "vllm"),
    ]
    if not config.prefix_cache:
        given.append("--no-enable-prefix-caching")
    if config.quantize == "fp8_row":
        given += ["--quantization", wire.QUANTIZATIONS["fp8_row"]]
    return given


def shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in a model directory, from the headers of its files.

    Raises:
        ConfigError: It has no weights in safetensors.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[int, ...]] = {}
    try:
        for path in sorted(model.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    found[name] = tuple(file.get_slice(name).get_shape())
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            field="model.path", rule="with whole safetensors files", value=str(error)
        ) from error
    if not found:
        raise ConfigError(
            field="model.path", rule="a directory with weights in safetensors", value=str(model)
        )
    return found
