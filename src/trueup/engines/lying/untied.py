"""A model directory whose output head is a tensor of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from trueup.errors import CheckpointError

_CHANGED = ("config.json", "model.safetensors", "MANIFEST.json")
"""Files that are written anew, and the list of digests that would no longer be right."""


def untied(model: Path, target: Path) -> Path:
    """Copy a Hugging Face directory with a tied head as one whose head is separate and equal.

    An engine built for the copy computes the same, and can be given a head that is not the
    embedding.

    Args:
        model: A directory with one `model.safetensors`.
        target: A directory that does not exist yet.

    Returns:
        The target; the directory itself if its head is not tied.

    Raises:
        CheckpointError: There is no such file, or it has not one embedding named `embed_tokens`.
    """
    from safetensors.torch import load_file, save_file

    config: dict[str, Any] = json.loads((model / "config.json").read_text("utf-8"))
    weights = model / "model.safetensors"
    if not weights.exists():
        raise CheckpointError(field=str(weights), rule="a file", value="nothing")
    tensors = load_file(weights)
    if "lm_head.weight" in tensors:
        return model
    embeddings = [name for name in tensors if name.endswith("embed_tokens.weight")]
    if len(embeddings) != 1:
        raise CheckpointError(field=str(weights), rule="with one embedding", value=embeddings)
    target.mkdir(parents=True)
    for file in model.iterdir():
        if file.is_file() and file.name not in _CHANGED:
            shutil.copyfile(file, target / file.name)
    changed = {**config, "tie_word_embeddings": False}
    (target / "config.json").write_text(json.dumps(changed, indent=2), "utf-8")
    head = {"lm_head.weight": tensors[embeddings[0]].clone()}
    save_file({**tensors, **head}, target / "model.safetensors", metadata={"format": "pt"})
    return target
