"""What a run can be resumed from: a Hugging Face directory that also holds optimiser and state.

Written beside, verified by a manifest of digests, then renamed: a checkpoint that exists is whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.errors import CheckpointError
from trueup.models.directory import MANIFEST
from trueup.models.load import load_model, save_model
from trueup.records.directory import RunDirectory
from trueup.training.resume import STATE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

OPTIMIZER = "optimizer.safetensors"
REFERENCE = "reference.safetensors"


def save(
    directory: Path,
    model: Any,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    *,
    tokenizer_files_from: Path,
    reference: Mapping[str, Tensor] | None = None,
) -> str:
    """Write a checkpoint.

    Args:
        directory: Where; replaced if it exists.
        model: The policy.
        optimizer: Its optimiser.
        state: What the controller needs to go on, JSON.
        tokenizer_files_from: Directory whose tokenizer to copy.
        reference: Tensors of the policy of the KL penalty, if there is one.

    Returns:
        SHA-256 of the manifest, in hex.

    Raises:
        CheckpointError: It cannot be written; an earlier one is untouched.
    """

    def extras(work: Path) -> None:
        from safetensors.torch import save_file

        save_file(_flat(model, optimizer), work / OPTIMIZER)
        if reference is not None:
            save_file(dict(reference), work / REFERENCE)
        (work / STATE).write_text(json.dumps(state, indent=1) + "\n")

    save_model(model, directory, tokenizer_files_from=tokenizer_files_from, also=extras)
    return hashlib.sha256((directory / MANIFEST).read_bytes()).hexdigest()


def load(directory: Path) -> tuple[Any, dict[str, Tensor]]:
    """Model and optimiser tensors of a checkpoint; see `restore_optimizer`.

    Raises:
        CheckpointError: Missing, altered or unreadable.
    """
    return load_model(directory), _tensors(directory / OPTIMIZER)


def load_reference(directory: Path) -> dict[str, Tensor]:
    """Tensors of the policy that a KL penalty is taken to.

    Raises:
        CheckpointError: Missing or unreadable: the run had no such penalty so far.
    """
    return _tensors(directory / REFERENCE)


def restore_optimizer(
    model: Any, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Put saved moments back, by parameter name."""
    for name, parameter in model.named_parameters():
        suffix = f":{name}"
        found = {
            key.removesuffix(suffix): tensor
            for key, tensor in tensors.items()
            if key.endswith(suffix)
        }
        if found:
            optimizer.state[parameter] = found


def retain(run: RunDirectory, keep: int) -> None:
    """Remove all but the newest checkpoints."""
    for path in sorted(run.checkpoints.glob("step-*"))[:-keep]:
        shutil.rmtree(path)


def _tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            field=f"{path.parent.name}/{path.name}", rule="readable", value=str(error)
        ) from None


def _flat(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{key}:{name}": value.contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
