"""Names that both ends of the wire know: the adapter here, the extension in vLLM's workers."""

from __future__ import annotations

EXTENSION = "trueup.engines.vllm.worker.Extension"
PROCESSOR = "trueup.engines.vllm.forcing:ForcedRows"
BACKEND = "trueup"
"""Name of our weight transfer in vLLM's factory."""
REQUEST_PREFIX = "generate-tokens-"
"""What vLLM's token-in / token-out route puts before the id of a request."""
FORCED = "trueup_forced_ids"
"""Key of a request's `extra_args`."""
QUANTIZATIONS = {"none": "", "int8": "compressed-tensors", "fp8_row": "fp8_per_channel"}
"""Grid of `EngineConfig.quantize` -> what vLLM calls it; others it cannot run on this hardware."""
