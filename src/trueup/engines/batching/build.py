"""The engine from the configuration."""

from __future__ import annotations

from pathlib import Path

import torch

from trueup.config import EngineConfig
from trueup.engines.batching.engine import BatchingEngine, Digest, Fetch
from trueup.errors import ConfigError
from trueup.models.load import load_model


def build(
    config: EngineConfig,
    *,
    model: Path,
    engine_id: str,
    epoch: int,
    fetch: Fetch,
    digest: Digest,
    paced: bool,
) -> BatchingEngine:
    """See `engines.table.Build`. Nothing of a prompt is reused, whatever `prefix_cache` says.

    Raises:
        ConfigError: A setting that this engine does not have.
    """
    for field, wrong, rule, value in (
        ("engine.quantize", config.quantize != "none", "none", config.quantize),
        ("engine.float32_head", config.float32_head, "false", True),
        ("engine.url", bool(config.url), "empty: it runs in this process", config.url),
        ("engine.kind", paced, "embedded, for a run on logical time", "transformers"),
    ):
        if wrong:
            raise ConfigError(field=field, rule=f"{rule} (transformers)", value=value)
    torch.set_num_threads(config.threads)
    return BatchingEngine(
        load_model(model, dtype=getattr(torch, config.dtype)),
        engine_id=engine_id,
        epoch=epoch,
        slots=config.slots,
        fetch=fetch,
        digest=digest,
        keep=config.kv_mode == "keep",
    )
