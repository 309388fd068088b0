"""What a run can be resumed from: a Hugging Face directory that also holds optimiser and state.

Written beside, verified by a manifest of digests, then renamed: a checkpoint that exists is whole.
The newest one that verifies is taken; what was skipped is said.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.errors import CheckpointError
from trueup.models.directory import MANIFEST, verify
from trueup.models.load import load_model, save_model
from trueup.records.directory import RunDirectory

if TYPE_CHECKING:
    import torch
    from torch import Tensor

OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"


def save(
    directory: Path,
    model: Any,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    *,
    tokenizer_files_from: Path,
) -> str:
    """Write a checkpoint.

    Args:
        directory: Where; replaced if it exists.
        model: The policy.
        optimizer: Its optimiser.
        state: What the controller needs to go on, JSON.
        tokenizer_files_from: Directory whose tokenizer to copy.

    Returns:
        SHA-256 of the manifest, in hex.

    Raises:
        CheckpointError: It cannot be written; an earlier one is untouched.
    """

    def extras(work: Path) -> None:
        from safetensors.torch import save_file

        save_file(_flat(model, optimizer), work / OPTIMIZER)
        (work / STATE).write_text(json.dumps(state, indent=1) + "\n")

    save_model(model, directory, tokenizer_files_from=tokenizer_files_from, also=extras)
    return hashlib.sha256((directory / MANIFEST).read_bytes()).hexdigest()


def newest_valid(run: RunDirectory) -> tuple[Path, list[tuple[str, str]]]:
    """The newest checkpoint that verifies, and (name, reason) of those that were skipped.

    Raises:
        CheckpointError: There is none.
    """
    skipped: list[tuple[str, str]] = []
    for path in sorted(run.checkpoints.glob("step-*"), reverse=True):
        try:
            if not verify(path):
                raise CheckpointError(field=path.name, rule="with a manifest", value="none")
            read_state(path)
        except CheckpointError as error:
            skipped.append((path.name, error.message))
            continue
        return path, skipped
    raise CheckpointError(
        field="checkpoints", rule="at least one that verifies", value=skipped or "none"
    )


def read_state(directory: Path) -> dict[str, Any]:
    """The controller's state of a checkpoint.

    Raises:
        CheckpointError: It is missing or malformed.
    """
    try:
        state = json.loads((directory / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            field=f"{directory.name}/{STATE}", rule="readable JSON", value=str(error)
        ) from None
    if not isinstance(state, dict):
        raise CheckpointError(field=f"{directory.name}/{STATE}", rule="an object", value=state)
    return state


def load(directory: Path) -> tuple[Any, dict[str, Tensor]]:
    """Model and optimiser tensors of a checkpoint; see `restore_optimizer`.

    Raises:
        CheckpointError: Missing, altered or unreadable.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    model = load_model(directory)
    try:
        return model, load_file(directory / OPTIMIZER)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            field=f"{directory.name}/{OPTIMIZER}", rule="readable", value=str(error)
        ) from None


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


def _flat(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{key}:{name}": value.contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
