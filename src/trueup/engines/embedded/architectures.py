"""Which forward an architecture gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.engines.embedded.fallback import ModuleNetwork
from trueup.engines.embedded.forward import SlimNetwork
from trueup.engines.embedded.network import Network

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def build_network(model: PreTrainedModel, slots: int, device: torch.device) -> Network:
    """The forward for an architecture.

    The slim one serves the model types it names; every other causal LM runs through the forward of
    its own transformers module, which is slower and always right.

    Args:
        model: Gives configuration, names and module; its weights are neither read nor kept.
        slots: Sequences that the cache can hold.
        device: Where to compute.
    """
    if SlimNetwork.serves(model.config):
        return SlimNetwork(model, slots, device)
    return ModuleNetwork(model, slots, device)
