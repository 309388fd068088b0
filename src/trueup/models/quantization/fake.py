"""The trainer's imitation of a quantised rollout forward, for measuring and never for gradients.

The linear layers of a Hugging Face model are exchanged for layers of the same grids as an engine's;
everything else stays. That cancels what quantised weights do to a log-prob, and what activations
with a scale per token do. A scale that all tokens of a forward share depends on what the engine
batched together, and can only be repeated from its record.

T tokens, N action tokens, L linear layers of the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trueup.errors import CheckpointError
from trueup.models.linear import Linear
from trueup.models.logprobs import action_logprobs
from trueup.models.packed import PackedBatch
from trueup.models.quantization.inputs import Tap
from trueup.models.quantization.linears import Kernel, quantized
from trueup.models.quantization.recording import Repetition
from trueup.models.quantization.schemes import Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def block_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear layers that a scheme is about, by name in module order: all but the LM head.

    Raises:
        CheckpointError: There is none; the architecture multiplies in modules of its own.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    if not found:
        raise CheckpointError(
            field="model", rule="one whose blocks have linear layers", value=type(model).__name__
        )
    return found


@contextmanager
def quantized_forward(
    model: PreTrainedModel,
    scheme: Scheme,
    *,
    kernel: Kernel = "fastest",
    tap: Callable[[int], Tap] | None = None,
) -> Iterator[None]:
    """Let a model compute on a scheme's grids; inside, nothing has a gradient.

    Args:
        model: Computes as before afterwards.
        scheme: The grids.
        kernel: What multiplies.
        tap: Makes what sits at the inputs of each of the L layers.

    Raises:
        CheckpointError: The model has no linear layers in its blocks.
    """
    linears = block_linears(model)
    weights = {id(linear.weight) for linear in linears.values()}
    others = [p for p in model.parameters() if scheme.everywhere and id(p) not in weights]
    before = [parameter.data for parameter in others]
    try:
        with torch.no_grad():
            for column, module in enumerate(linears.values()):
                layer = quantized(
                    module.weight.detach(),
                    module.bias,
                    scheme,
                    dtype=module.weight.dtype,
                    kernel=kernel,
                    tap=None if tap is None else tap(column),
                )
                module.__dict__["forward"] = _forward(layer)
            for parameter in others:
                parameter.data = scheme.other(parameter.data)
            yield
    finally:
        for module in linears.values():
            module.__dict__.pop("forward", None)
        for parameter, data in zip(others, before, strict=True):
            parameter.data = data


def quantized_logprobs(
    model: PreTrainedModel,
    batch: PackedBatch,
    scheme: Scheme,
    *,
    scales: Tensor | None = None,
    kernel: Kernel = "fastest",
    temperature: float = 1.0,
    microbatch_tokens: int = 8192,
) -> Tensor:
    """Score action tokens on a scheme's grids: [N] float32.

    Args:
        model: Any Hugging Face causal LM.
        batch: Segments.
        scheme: The grids.
        scales: [N, L] what the engine recorded with each action token (`types.Replay.scales`); NaN
            where it did not. Then segments are scored one by one, so that no token shares a
            forward with padding.
        kernel: What multiplies.
        temperature: Divides the logits, as in sampling.
        microbatch_tokens: Padded positions that one forward holds, without recorded scales.

    Raises:
        CheckpointError: The model has no linear layers in its blocks.
    """
    repetition = Repetition()
    with quantized_forward(model, scheme, kernel=kernel, tap=repetition.tap):
        if scales is None:
            return action_logprobs(
                model, batch, temperature=temperature, microbatch_tokens=microbatch_tokens
            ).logp
        logp = torch.empty(len(batch.action_index))
        for index in range(len(batch.lengths)):
            segment = torch.tensor([index])
            actions, alone = batch.actions_of(segment), batch.select(segment)
            repetition.scales = scales_of_tokens(alone, scales[actions]).to(model.device)
            logp[actions] = action_logprobs(model, alone, temperature=temperature).logp.cpu()
        return logp


def scales_of_tokens(batch: PackedBatch, scales: Tensor) -> Tensor:
    """[T, L] the scales of the forward that computed each token, from those of action tokens.

    An action token was drawn from the logits of a forward that computed everything before it since
    the action token before. So a token's scales are those of the next action token behind it; what
    nothing was sampled behind was never computed, and has NaN.

    Args:
        batch: Segments.
        scales: [N, L] of the forward that each action token was drawn from.
    """
    token = torch.arange(len(batch.token_ids))
    following = torch.searchsorted(batch.action_index, token, right=True)  # [T] in [0, N]
    ends = batch.offsets[1:].repeat_interleave(batch.lengths)
    beyond = torch.cat([batch.action_index, batch.offsets[-1:]])[following] >= ends
    rows = torch.cat([scales, scales.new_full((1, scales.shape[1]), torch.nan)])
    return rows[torch.where(beyond, len(scales), following)]


def _forward(layer: Linear) -> Callable[[Tensor], Tensor]:
    """A module's forward: any leading dimensions."""
    return lambda x: layer(x.flatten(0, -2)).view(*x.shape[:-1], -1)
