"""What of trueup runs inside vLLM's workers: weights out of shared memory, verified and attested.

An update has two halves. `trueup_stage` reads a published version and verifies it against its
manifest in a thread, beside the decoding; nothing of the model is touched, so a version that is
torn or foreign is refused with the old one whole. While the scheduler is paused, vLLM's update
calls then replace the weights by the staged ones. Runs in vLLM's environment.

vLLM keeps a second copy of some matrices in the layout of its kernels. Its reload renews those of
linear layers, but not that of a head tied to the embedding, which would go on answering with the
old weights: hence `repack_heads`. Checksums of parameters cannot see any of this, because on a CPU
the parameters of packed layers are empty; what is attested is therefore the digest of the tensors
that were received.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.utils.torch_utils import set_default_torch_dtype

from trueup.engines.vllm import int8
from trueup.engines.vllm.forcing import ForcingSampler
from trueup.engines.vllm.wire import BACKEND, QUANTIZATIONS
from trueup.errors import TransportFault, TrueupError
from trueup.sync.digest import digest
from trueup.sync.directory import DirectoryTransport
from trueup.sync.manifest import manifest_from_dict
from trueup.types import WeightManifest

if TYPE_CHECKING:
    import torch


@dataclass
class Staged:
    """A version on its way into a worker."""

    manifest: WeightManifest
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    digest: str = ""
    """Of the received tensors; empty until all are verified."""
    prepare_s: float = 0.0
    """Spent on quantising."""
    error: TrueupError | None = None


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing is needed beforehand: every version says where it lies."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which staged version to load."""

    version: int


class StagedTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Loads the version that was staged."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    staged: Staged | None = None
    repacks = True
    """Off only where a test shows what happens without."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: versions are found by their manifests."""

    def start_weight_update(self) -> None:
        """Do nothing: the model stays whole until `receive_weights` has what it needs."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Replace the weights, layer by layer.

        Raises:
            TransportFault: This version is not staged; nothing was changed.
        """
        staged, self.staged = self.staged, None
        if staged is None or not staged.digest or staged.manifest.version != update_info.version:
            raise TransportFault(
                field="update", rule="of the version that is staged", value=update_info.version
            )
        # Kernels are made for the default dtype, which outside vLLM's own loading is float32: its
        # INT8 kernel would then write float32 into bfloat16.
        with set_default_torch_dtype(self.model_config.dtype):
            initialize_layerwise_reload(self.model)
            if self.model_config.quantization == QUANTIZATIONS["int8"]:
                keep_fresh_scales(self.model)
            self.model.load_weights(iter(staged.tensors.items()))

    def finish_weight_update(self) -> None:
        """Renew every copy that the kernels use."""
        with set_default_torch_dtype(self.model_config.dtype):
            finalize_layerwise_reload(self.model, self.model_config)
            if self.repacks:
                repack_heads(self.model)

    def shutdown(self) -> None:
        """Free a version that was staged and not loaded."""
        self.staged = None


def keep_fresh_scales(model: torch.nn.Module) -> None:
    """Let quantised layers keep the tensors that a reload makes, instead of the old ones' memory.

    vLLM's INT8 kernel on CPUs reads the scales where they lay when it was made. A reload copies
    them into the old tensors and frees those, and every logit is then noise.
    """
    for module in model.modules():
        info = get_layerwise_info(module)
        if "weight_scale" in info.restore_metadata[0]:
            info.kernel_tensors = None


def repack_heads(model: torch.nn.Module) -> None:
    """Make the kernels' copies of embeddings and heads anew from their present weights."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


class Extension:
    """Methods that vLLM adds to its worker; called by name, with strings, answered by dicts."""

    weight_transfer_engine: StagedTransfer
    model_runner: Any

    def trueup_connect(self) -> dict[str, Any]:
        """Let requests be forced; say how many ids there are."""
        self.model_runner.sampler.__class__ = ForcingSampler
        return {"vocab_size": self.model_runner.model_config.get_vocab_size()}

    def trueup_stage(self, manifest: str, quantize: str) -> dict[str, Any]:
        """Begin to read and verify a version.

        Args:
            manifest: As JSON.
            quantize: `int8` or `none`; other precisions are vLLM's own to make.
        """
        staged = Staged(manifest_from_dict(json.loads(manifest)))
        self.weight_transfer_engine.staged = staged
        threading.Thread(target=_read, args=(staged, quantize), daemon=True).start()
        return {}

    def trueup_staged(self) -> dict[str, Any]:
        """How far that is: `digest` is empty while it goes on, `error` says why it was refused."""
        staged = self.weight_transfer_engine.staged
        if staged is None:
            return {"error": TransportFault("no version is being staged").as_dict()}
        if staged.error is not None:
            self.weight_transfer_engine.staged = None
            return {"error": staged.error.as_dict()}
        return {
            "version": staged.manifest.version,
            "digest": staged.digest,
            "prepare_s": staged.prepare_s,
        }

    def trueup_cached(self, request_ids: str) -> dict[str, Any]:
        """Tokens whose keys and values are held for requests in flight (JSON list of their ids)."""
        names = tuple(json.loads(request_ids))
        states = self.model_runner.requests.items()
        # vLLM adds its own prefix and suffix to an id. The last sample of a turn is not yet cached.
        return {
            "tokens": sum(
                len(state.prompt_token_ids) + len(state.output_token_ids) - 1
                for name, state in states
                if state.output_token_ids and any(wanted in name for wanted in names)
            )
        }

    def trueup_repacks(self, on: str) -> dict[str, Any]:
        """Test hook: leave the head as vLLM's reload leaves it (`off`)."""
        self.weight_transfer_engine.repacks = on == "on"
        return {}


def _read(staged: Staged, quantize: str) -> None:
    manifest = staged.manifest
    try:
        source = Path(manifest.location)
        if not source.is_absolute():
            raise TransportFault(
                field="manifest.location", rule="a directory that a worker can read", value=source
            )
        reader = DirectoryTransport(manifest.transport, source.parent, durable=False)
        tensors = reader.fetch(manifest)
        received = digest(tensors)
        began = time.monotonic()
        staged.tensors = int8.quantized(tensors) if quantize == "int8" else tensors
        staged.prepare_s = time.monotonic() - began
        staged.digest = received
    except TrueupError as error:
        staged.error = error


WeightTransferEngineFactory.register_engine(BACKEND, StagedTransfer)
