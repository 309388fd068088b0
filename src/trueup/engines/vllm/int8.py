"""INT8 for vLLM: weights per output channel, activations per token and dynamic (W8A8).

vLLM runs it on a CPU from checkpoints in the compressed-tensors format, so a model is described to
it in that format (`described`) and every version is brought into it on load (`quantized`):
q = round(w / s), s = max |w| / 127 over a row, as INT8 of the embedded engine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DENSE = ("embed", "lm_head")
"""Parts of names of matrices that stay as they are: the embedding, and the head."""


def quantized(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a checkpoint in that format: `weight` int8 [n, k], `weight_scale` [n, 1]."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not _is_linear(name, tensor):
            found[name] = tensor
            continue
        wide = tensor.float()
        # A row of zeros has no scale of its own; any will do.
        scale = wide.abs().amax(1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny) / 127
        found[name] = (wide / scale).round_().clamp_(-127, 127).to(torch.int8)
        found[f"{name}_scale"] = scale
    return found


def described(model: Path, target: Path) -> Path:
    """Write the description of a model as INT8 into a directory, without weights.

    Args:
        model: Its directory.
        target: Where to; made.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja", ".model"):
            shutil.copyfile(path, target / path.name)
    config = json.loads((model / "config.json").read_bytes())
    config["quantization_config"] = _scheme()
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return target


def _is_linear(name: str, tensor: Tensor) -> bool:
    return tensor.ndim == 2 and name.endswith(".weight") and not any(x in name for x in _DENSE)


def _scheme() -> dict[str, Any]:
    grid = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**grid, "strategy": "channel", "dynamic": False},
                "input_activations": {**grid, "strategy": "token", "dynamic": True},
            }
        },
    }
