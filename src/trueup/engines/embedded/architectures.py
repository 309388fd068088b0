"""Which forward an architecture gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trueup.engines.embedded.fallback import ModuleNetwork
from trueup.engines.embedded.forward import SlimNetwork
from trueup.engines.embedded.memory import Arithmetic
from trueup.engines.embedded.network import Network
from trueup.errors import EngineFault

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def build_network(
    model: PreTrainedModel, slots: int, device: torch.device, arithmetic: Arithmetic
) -> Network[Any]:
    """The forward for an architecture.

    The slim one serves the model types it names; every other causal LM runs through the forward of
    its own transformers module, which is slower and always right.

    Args:
        model: Gives configuration, names and module; its weights are neither read nor kept.
        slots: Sequences that the cache can hold.
        device: Where to compute.
        arithmetic: What to compute in.

    Raises:
        EngineFault: Only a slim forward computes in several dtypes or quantised.
    """
    if SlimNetwork.serves(model.config):
        return SlimNetwork(model, slots, device, arithmetic)
    plain = Arithmetic(dtype=arithmetic.dtype, head_dtype=arithmetic.dtype)
    if arithmetic != plain:
        raise EngineFault(
            field=f"arithmetic of a {model.config.model_type} model",
            rule="unquantised and of one dtype: it runs through its own module",
            value=arithmetic,
        )
    return ModuleNetwork(model, slots, device)
