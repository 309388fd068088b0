"""An adapter from the configuration: where the server listens, and what it cannot be asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trueup.config import EngineConfig
from trueup.engines.http import Address, JsonClient
from trueup.engines.openai.engine import OpenAIEngine
from trueup.errors import CheckpointError, ConfigError
from trueup.types import WeightManifest

if TYPE_CHECKING:
    from torch import Tensor


def build(
    config: EngineConfig,
    *,
    model: Path,
    engine_id: str,
    epoch: int,
    fetch: Callable[[WeightManifest], dict[str, Tensor]],
    digest: Callable[[Mapping[str, Tensor]], str],
    paced: bool,
) -> OpenAIEngine:
    """See `engines.table.Build`; neither `fetch` nor `digest` is used.

    The environment variable TRUEUP_ENGINE_TOKEN holds a bearer token, TRUEUP_ENGINE_PLAIN_HTTP
    the hosts, separated by commas, that may be spoken to without encryption.

    Raises:
        ConfigError: No URL, or one that is not allowed; a setting that only the server has.
        CheckpointError: The directory does not say how large the vocabulary is.
    """
    for field, wrong, rule, value in (
        ("engine.url", not config.url, "the address of a server", config.url),
        ("engine.kv_mode", config.kv_mode == "keep", "recompute: weights never change", "keep"),
        ("engine.float32_head", config.float32_head, "set where the server is started", True),
        ("engine.prefix_cache", not config.prefix_cache, "set where the server is started", False),
        ("engine.kind", paced, "embedded, for a run on logical time", "openai"),
    ):
        if wrong:
            raise ConfigError(field=field, rule=f"{rule} (openai)", value=value)
    plain = [host for host in os.environ.get("TRUEUP_ENGINE_PLAIN_HTTP", "").split(",") if host]
    client = JsonClient(
        Address.parse(config.url, plain_http=plain),
        token=os.environ.get("TRUEUP_ENGINE_TOKEN", ""),
        connections=config.slots,
    )
    return OpenAIEngine(
        client,
        engine_id=engine_id,
        epoch=epoch,
        slots=config.slots,
        precision=config.precision,
        vocab_size=_vocab_size(model),
    )


def _vocab_size(model: Path) -> int:
    try:
        found = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            field=f"{model}/config.json", rule="readable JSON", value=repr(error)
        ) from error
    size = found.get("vocab_size", (found.get("text_config") or {}).get("vocab_size"))
    if not isinstance(size, int) or size < 1:
        raise CheckpointError(field=f"{model}/config.json: vocab_size", rule=">= 1", value=size)
    return size
