"""Llama models in GGUF files, as the Hugging Face model and tokenizer that they were made from.

A GGUF file holds the weights under short names, most of them on a block grid, and the rows of query
and key permuted for a rotary embedding of neighbouring pairs. Here they get their names, row order
and plain numbers back.

H: heads, D: head dimension.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import LlamaConfig, PreTrainedTokenizerFast

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_UNSUPPORTED_KEYS = ("llama.rope.scaling.type", "llama.expert_count")
_CONTROL = 3
"""`tokenizer.ggml.token_type` of a special token."""


class GgufModel:
    """A Llama and its tokenizer in one GGUF file.

    Args:
        path: The file; memory-mapped.

    Raises:
        CheckpointError: The `gguf` package is missing, or the file is no GGUF or another
            architecture.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = _open(path)
        self._expect("general.architecture", "llama")
        for key in _UNSUPPORTED_KEYS:
            if key in self._reader.fields:
                raise CheckpointError(field=f"{path}: {key}", rule="absent", value=self._get(key))

    def config(self) -> LlamaConfig:
        """The architecture.

        Raises:
            CheckpointError: An entry is missing.
        """
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=len(self._get("tokenizer.ggml.tokens")),
            hidden_size=self._get("llama.embedding_length"),
            intermediate_size=self._get("llama.feed_forward_length"),
            num_hidden_layers=self._get("llama.block_count"),
            num_attention_heads=self._get("llama.attention.head_count"),
            num_key_value_heads=self._get("llama.attention.head_count_kv"),
            max_position_embeddings=self._get("llama.context_length"),
            rms_norm_eps=self._get("llama.attention.layer_norm_rms_epsilon"),
            rope_parameters={
                "rope_type": "default",
                "rope_theta": self._get("llama.rope.freq_base"),
            },
            tie_word_embeddings=not any(t.name == "output.weight" for t in self._reader.tensors),
            architectures=["LlamaForCausalLM"],
            dtype="bfloat16",
            bos_token_id=self._token("bos"),
            eos_token_id=self._token("eos"),
            pad_token_id=self._token("padding"),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Every weight under its Hugging Face name, in bfloat16.

        Raises:
            CheckpointError: A tensor has no place in a Llama, or an unknown grid.
        """
        heads = {
            "attn_q": self._get("llama.attention.head_count"),
            "attn_k": self._get("llama.attention.head_count_kv"),
        }
        return dict(self._tensor(entry, heads) for entry in self._reader.tensors)

    def save(self, directory: Path) -> None:
        """Write config, weights and tokenizer into an existing directory.

        Raises:
            CheckpointError: The file holds something else than a Llama and its tokenizer.
        """
        from safetensors.torch import save_file

        self.config().save_pretrained(directory)
        self.tokenizer().save_pretrained(directory)
        save_file(self.tensors(), directory / "model.safetensors", metadata={"format": "pt"})

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The byte-level BPE tokenizer, with its chat template if there is one.

        Raises:
            CheckpointError: It is of another kind.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        self._expect("tokenizer.ggml.model", "gpt2")
        self._expect("tokenizer.ggml.pre", "smollm")
        words: list[str] = self._get("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ", 1)) for merge in self._get("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
        # What the kind "smollm" stands for: every digit by itself, then GPT-2's pattern.
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        kinds = self._get("tokenizer.ggml.token_type")
        tokenizer.add_special_tokens(
            [word for word, kind in zip(words, kinds, strict=True) if kind == _CONTROL]
        )
        uses = (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"))
        named = {
            name: words[index] for name, use in uses if (index := self._token(use)) is not None
        }
        fast: Any = PreTrainedTokenizerFast
        made: PreTrainedTokenizerFast = fast(
            tokenizer_object=tokenizer,
            model_max_length=self._get("llama.context_length"),
            clean_up_tokenization_spaces=False,
            **named,
        )
        if "tokenizer.chat_template" in self._reader.fields:
            made.chat_template = self._get("tokenizer.chat_template")
        return made

    def _token(self, use: str) -> int | None:
        """Id of the token that begins (`bos`), ends (`eos`) or fills up (`padding`) a text."""
        key = f"tokenizer.ggml.{use}_token_id"
        return int(self._get(key)) if key in self._reader.fields else None

    def _tensor(self, entry: Any, heads: Mapping[str, int]) -> tuple[str, Tensor]:
        import torch
        from gguf import dequantize

        layer, _, part = entry.name.removeprefix("blk.").partition(".")
        short = part.removesuffix(".weight")
        if entry.name in _OUTER:
            name = _OUTER[entry.name]
        elif entry.name.endswith(".weight") and short in _INNER:
            name = f"model.layers.{layer}.{_INNER[short]}.weight"
        else:
            raise CheckpointError(
                field=f"{self._path}: tensor", rule="a weight of a Llama", value=entry.name
            )
        try:
            values = dequantize(entry.data, entry.tensor_type)
        except NotImplementedError:
            raise CheckpointError(
                field=f"{self._path}: {entry.name}",
                rule="on a grid that the gguf package can read",
                value=entry.tensor_type.name,
            ) from None
        if short in heads:
            values = _halves(values, heads[short])
        return name, torch.from_numpy(values.copy()).to(torch.bfloat16)

    def _get(self, key: str) -> Any:
        field = self._reader.fields.get(key)
        if field is None:
            raise CheckpointError(field=f"{self._path}: {key}", rule="present", value=None)
        return field.contents()

    def _expect(self, key: str, only: str) -> None:
        found = self._get(key)
        if found != only:
            raise CheckpointError(field=f"{self._path}: {key}", rule=only, value=found)


def demand_package() -> None:
    """Refuse to go on without the package that reads GGUF files.

    Raises:
        CheckpointError: It is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(
            field="package gguf",
            rule="installed, to read a GGUF file (pip install 'trueup[models]')",
            value="missing",
        )


def _open(path: Path) -> GGUFReader:
    demand_package()
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(field=str(path), rule="a GGUF file", value=str(error)) from None


def _halves(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Row order of a rotary embedding over halves from that over pairs: [H·D, in] -> [H·D, in]."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
