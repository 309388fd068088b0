"""Tiny models of several architectures, and embedded cores that serve them."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trueup.engines.embedded.core import EmbeddedCore
from trueup.models.load import state_tensors
from trueup.sync.digest import digest
from trueup.sync.inprocess import InProcessTransport
from trueup.types import Completion, GenerateRequest, SamplingParams, WeightManifest

VOCABULARY, POSITIONS = 40, 256

torch.set_num_threads(1)  # these models are too small to share, and tests run beside each other


def tiny(kind: str = "llama", *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Any:
    """A random causal LM of a stock architecture, in evaluation mode."""
    from transformers import (
        AutoModelForCausalLM,
        GPTNeoXConfig,
        LlamaConfig,
        OPTConfig,
        Qwen2Config,
        Qwen3Config,
    )

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
    }
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "llama": (LlamaConfig, {"intermediate_size": 48}),
        "llama-gqa-tied-bias": (
            LlamaConfig,
            {
                "intermediate_size": 48,
                "num_key_value_heads": 2,
                "tie_word_embeddings": True,
                "attention_bias": True,
                "mlp_bias": True,
            },
        ),
        "qwen2": (Qwen2Config, {"intermediate_size": 48, "num_key_value_heads": 2}),
        "qwen3": (Qwen3Config, {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 16}),
        "gpt_neox": (GPTNeoXConfig, {"intermediate_size": 48}),
        "opt": (OPTConfig, {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    }
    config_class, extra = kinds[kind]
    config = config_class(**{**shape, **extra, **overrides}, dtype=dtype)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():  # biases and norms away from 0 and 1, logits apart
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train(False)


def request(
    session: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    stop_ids: tuple[int, ...] = (),
    key: tuple[int, ...] = (0,),
    forced: Sequence[int] | None = None,
    **sampling: Any,
) -> GenerateRequest:
    """A turn to sample, or to decode as it is given."""
    return GenerateRequest(
        session=session,
        prompt_ids=array("i", prompt),
        sampling=SamplingParams(max_tokens=max_tokens, stop_ids=stop_ids, key=key, **sampling),
        forced_ids=None if forced is None else array("i", forced),
    )


@dataclass
class Publisher:
    """Publishes versions for engines to load."""

    transport: InProcessTransport = field(default_factory=InProcessTransport)
    version: int = 0

    def publish(self, model: Any) -> WeightManifest:
        """The next version: the model's weights as they are now."""
        self.version += 1
        return self.transport.publish(self.version, state_tensors(model))

    def core(
        self, model: Any, *, slots: int = 4, engine_id: str = "e", **options: Any
    ) -> EmbeddedCore:
        """An empty core for the model's architecture."""
        return EmbeddedCore(
            model,
            engine_id=engine_id,
            epoch=3,
            slots=slots,
            dtype=str(model.dtype).removeprefix("torch."),
            fetch=self.transport.fetch,
            digest=digest,
            **options,
        )

    def serving(self, model: Any, **options: Any) -> EmbeddedCore:
        """A core that serves the model's weights."""
        core = self.core(model, **options)
        load(core, self.publish(model))
        return core


def load(core: EmbeddedCore, manifest: WeightManifest) -> int:
    """Stage and swap; returns the tokens to recompute."""
    core.stage(manifest)
    return core.swap()


def finish(core: EmbeddedCore) -> dict[str, Completion]:
    """Step until nothing is left to decode; the turns that ended, by session."""
    ended: dict[str, Completion] = {}
    while core.busy:
        ended.update((completion.session, completion) for completion in core.step())
    return ended


@torch.no_grad()
def reference_logps(
    model: Any, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """[n] log-probs of the sampled tokens from one full forward, log-softmax in float64."""
    ids = torch.tensor([*prompt, *sampled])
    logits = model(input_ids=ids[None]).logits[0].double() / temperature
    table = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return table.gather(1, ids[len(prompt) :, None])[:, 0]


def logps(completion: Completion) -> Tensor:
    """[n] what the engine said, in float64."""
    return torch.tensor(list(completion.logps), dtype=torch.float64)


def copied(model: Any) -> Mapping[str, Tensor]:
    """The model's tensors in memory of their own."""
    return {name: tensor.clone() for name, tensor in state_tensors(model).items()}
