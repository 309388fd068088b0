"""Policies in and out of Hugging Face directories, and the tensors that make one up.

Only local files, only safetensors, no code from a checkpoint. Our own directories carry a manifest
of digests and are verified by it; a foreign one is verified as far as its format goes (every
parameter present, of the right shape).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trueup.errors import CheckpointError, DataError
from trueup.models.chat import ROLES_FILE
from trueup.models.directory import publish, verify
from trueup.models.logprobs import verify_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    ROLES_FILE,
)
"""What travels with a model besides its weights; a directory need not have all of them."""


def load_model(directory: Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a causal LM from a local directory, in evaluation mode.

    Args:
        directory: `config.json` and safetensors; verified by its manifest if it has one.
        dtype: Arithmetic of the parameters.

    Raises:
        CheckpointError: Missing, unreadable, corrupt, incomplete, or no causal LM with a linear
            head.
    """
    verify(directory)
    model = _from_pretrained(directory, dtype)
    verify_head(model)
    return model


def save_model(
    model: PreTrainedModel,
    directory: Path,
    *,
    tokenizer_files_from: Path | None = None,
    also: Callable[[Path], None] | None = None,
) -> None:
    """Write a model as a Hugging Face directory: beside it, verified by a manifest, then renamed.

    Args:
        model: What to write.
        directory: Where; replaced if it exists.
        tokenizer_files_from: Directory whose tokenizer and roles to copy.
        also: Writes further files into the directory before it is sealed.

    Raises:
        CheckpointError: It cannot be written.
    """
    with publish(directory) as work:
        with _no_progress_bars():
            model.save_pretrained(work)
        for name in _TOKENIZER_FILES if tokenizer_files_from else ():
            source = Path(str(tokenizer_files_from)) / name
            if source.exists():
                shutil.copyfile(source, work / name)
        if also is not None:
            also(work)


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor that makes up a model, by name: what is published, digested and loaded.

    Parameters and persistent buffers, detached, sharing the model's memory; tied ones once, under
    their first name.
    """
    return {name: variable.detach() for name, variable in _variables(model).items()}


@torch.no_grad()
def load_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a version into a model: all of them, or none.

    Raises:
        DataError: A tensor is missing, unknown, or of another shape or dtype.
    """
    own = state_tensors(model)
    _check_fit(own, tensors)
    for name, tensor in tensors.items():
        own[name].copy_(tensor)


@contextmanager
def borrowed_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a model compute with the tensors of another version for a while; nothing is copied.

    Raises:
        DataError: A tensor is missing, unknown, or of another shape or dtype.
    """
    variables = _variables(model)
    _check_fit(variables, tensors)
    own = {name: variable.data for name, variable in variables.items()}
    try:
        for name, variable in variables.items():
            variable.data = tensors[name]
        yield
    finally:
        for name, variable in variables.items():
            variable.data = own[name]


def _variables(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers; tied ones once, under their first name."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, variable in model.state_dict(keep_vars=True).items():
        if id(variable) not in seen:
            seen.add(id(variable))
            found[name] = variable
    return found


def _check_fit(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    if own.keys() != tensors.keys():
        raise DataError(
            field="tensors",
            rule=f"the {len(own)} tensors of the model",
            value=f"missing {sorted(own.keys() - tensors.keys())}, "
            f"unknown {sorted(tensors.keys() - own.keys())}",
        )
    for name, tensor in tensors.items():
        expected = (tuple(own[name].shape), own[name].dtype)
        if (tuple(tensor.shape), tensor.dtype) != expected:
            raise DataError(
                field=f"tensor {name}",
                rule=f"of shape and dtype {expected}",
                value=(tuple(tensor.shape), tensor.dtype),
            )


def _from_pretrained(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel
    try:
        with _no_progress_bars():
            model, info = auto.from_pretrained(
                directory,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            field=str(directory), rule="a causal LM in safetensors", value=str(error)
        ) from None
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        if info[problem]:
            raise CheckpointError(
                field=f"{directory}: {problem}", rule="empty", value=sorted(map(str, info[problem]))
            )
    return model


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    bars: Any = logging
    enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            bars.enable_progress_bar()
