"""A GGUF file written from a model, as llama.cpp's own converter writes it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = [*SPECIALS, *ALPHABET, "Ġa", "11"]
MERGES = ["Ġ a", "1 1"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SHORT = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def small_llama(*, tied: bool = True, seed: int = 0) -> LlamaForCausalLM:
    """Grouped heads, and weights that bfloat16 can hold."""
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # not the buffers: rotary frequencies stay float32
            parameter.copy_(parameter.bfloat16())
    return model.eval()


def write_gguf(path: Path, model: LlamaForCausalLM, **changes: Any) -> None:
    """Write the file; `changes` replace entries, by their last name; None leaves one out."""
    from gguf import GGUFWriter, quantize

    config = model.config
    writer = GGUFWriter(path, changes.get("architecture", "llama"))
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
    }
    for key, value in numbers.items():
        if changes.get(key, value) is not None:
            writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.rope.freq_base", config.rope_parameters["rope_theta"])
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    if "scaling" in changes:
        writer.add_string("llama.rope.scaling.type", changes["scaling"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(WORDS) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    if changes.get("template", TEMPLATE):
        writer.add_chat_template(TEMPLATE)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        short, values = _renamed(name, tensor.numpy(), heads)
        grid = changes.get("grid", {}).get(short)
        if grid is not None:
            values = quantize(values, grid)
        writer.add_tensor(short, values, raw_dtype=grid)
    for name in changes.get("extra", ()):
        writer.add_tensor(name, np.zeros(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _renamed(
    name: str, values: np.ndarray[Any, Any], heads: dict[str, int]
) -> tuple[str, np.ndarray[Any, Any]]:
    if name in _OUTER:
        return _OUTER[name], values
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    short = _SHORT[part.removesuffix(".weight")]
    if short in heads:
        rows, columns = values.shape
        halves = values.reshape(heads[short], 2, rows // heads[short] // 2, columns)
        values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
    return f"blk.{layer}.{short}.weight", values
