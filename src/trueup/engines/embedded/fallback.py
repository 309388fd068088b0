"""Any other causal LM, by the forward of its own transformers module and its own cache.

One call per row: positions, masks and cache layouts differ between architectures, and only a
sequence by itself means the same to all of them. Right for every model, fast for none; an
architecture worth the speed gets a slim forward.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trueup.engines.embedded.network import Batch
from trueup.engines.embedded.parameters import Parameters
from trueup.models.caching import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModuleNetwork:
    """The module's own forward; see `network.Network`."""

    fused: tuple[tuple[str, ...], ...] = ()

    def __init__(self, model: PreTrainedModel, slots: int, device: torch.device) -> None:
        """Keep a copy of the module, whose weights `bind` replaces."""
        module: Any = copy.deepcopy(model)
        self._module = module.to(device).train(False)
        self._device = device
        self._caches: list[Any] = [None] * slots
        self._states: Tensor | None = None
        self._cache_argument = cache_argument(self._module)

    def prepare(self, parameters: Parameters) -> Parameters:
        """See `network.Network.prepare`; the module reads the parameters themselves."""
        return parameters

    def bind(self, prepared: Parameters) -> None:
        """See `network.Network.bind`; tied tensors are one object, so one assignment moves both."""
        own = self._module.state_dict(keep_vars=True)
        for name, tensor in prepared.named.items():
            own[name].data = tensor

    def copy(self, source: int, target: int, length: int) -> int:
        """See `network.Network.copy`."""
        self._caches[target] = copy.deepcopy(self._caches[source])
        return self.keep(target, length)

    def scales(self) -> None:
        """See `network.Network.scales`; a module is not quantised."""

    def keep(self, slot: int, length: int) -> int:
        """See `network.Network.keep`; a cache that cannot be cropped is forgotten."""
        cache = self._caches[slot]
        if cache is None:
            return 0
        surplus = cache.get_seq_length() - length
        if surplus and not all(layer.is_croppable for layer in cache.layers):
            self.clear(slot)
            return 0
        if surplus:
            cache.crop(-surplus)
        return length

    def clear(self, slot: int) -> None:
        """See `network.Network.clear`."""
        self._caches[slot] = None

    def close(self) -> None:
        """See `network.Network.close`."""
        self._caches = []
        del self._module

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """See `network.Network.forward`."""
        last, behind = [], []
        pieces = np.split(batch.tokens, np.cumsum(batch.counts)[:-1])
        rows = zip(batch.slots, batch.cached, batch.known, pieces, strict=True)
        for slot, cached, known, tokens in rows:
            ids = torch.from_numpy(tokens)[None].to(self._device)
            logits = self._extend(int(slot), int(cached), ids)
            last.append(logits[-1])
            behind.append(logits[len(logits) - 1 - known : -1])
        self._states = torch.cat(behind) if batch.known.any() else None
        return torch.stack(last).float()

    def states(self) -> Tensor | None:
        """See `network.Network.states`; a module gives its logits at once."""
        return self._states

    def logits(self, states: Tensor) -> Tensor:
        """See `network.Network.logits`."""
        return states.float()

    def _extend(self, slot: int, cached: int, ids: Tensor) -> Tensor:
        """[n, V] logits behind the new ids."""
        from transformers import DynamicCache

        if not cached:
            self._caches[slot] = DynamicCache(config=self._module.config)
        cache = self._caches[slot]
        output = self._module(input_ids=ids, use_cache=True, **{self._cache_argument: cache})
        logits: Tensor = output.logits[0]
        return logits
