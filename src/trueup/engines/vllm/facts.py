"""What a vLLM server says of its own configuration, and whether it can be trained from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trueup.engines.vllm import wire
from trueup.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says of its own configuration."""

    logprobs_mode: str
    context: int
    """Most tokens of prompt and completion together."""
    slots: int
    cache_block: int
    """Tokens of a block, the unit in which a prefix is found again."""
    prefix_cache: bool
    dtype: str
    quantization: str
    """Empty: none."""
    backend: str
    """Weight transfer; empty: none."""
    extension: str
    processors: tuple[str, ...]


def facts_of(config: Mapping[str, Any]) -> ServerFacts:
    """Read what matters out of vLLM's own configuration, as JSON."""
    model, cache = config["model_config"], config["cache_config"]
    transfer: Mapping[str, Any] = config.get("weight_transfer_config") or {}
    processors: Sequence[Any] = model.get("logits_processors") or ()
    return ServerFacts(
        logprobs_mode=str(model["logprobs_mode"]),
        context=int(model["max_model_len"]),
        slots=int(config["scheduler_config"]["max_num_seqs"]),
        cache_block=int(cache["block_size"]),
        prefix_cache=bool(cache["enable_prefix_caching"]),
        dtype=str(model["dtype"]).removeprefix("torch."),
        quantization=str(model.get("quantization") or ""),
        backend=str(transfer.get("backend") or ""),
        extension=str(config["parallel_config"].get("worker_extension_cls") or ""),
        processors=tuple(str(processor) for processor in processors),
    )


def check_server(facts: ServerFacts, precision: str) -> None:
    """Refuse a server whose answers would be no behaviour log-probs, or that cannot be updated.

    Args:
        facts: What it says of itself.
        precision: What spans are to name.

    Raises:
        ConfigError: Its log-prob mode, extension, weight transfer, arithmetic or quantisation.
    """
    dtype, _, grid = precision.partition("+")
    wanted = {
        "--logprobs-mode": ("processed_logprobs", facts.logprobs_mode),
        "--worker-extension-cls": (wire.EXTENSION, facts.extension),
        "--weight-transfer-config backend": (wire.BACKEND, facts.backend),
        "--dtype": (dtype, facts.dtype),
        "quantization": (wire.QUANTIZATIONS[grid or "none"], facts.quantization),
    }
    for option, (expected, found) in wanted.items():
        if found != expected:
            raise ConfigError(field=f"vLLM {option}", rule=expected or "none", value=found)
