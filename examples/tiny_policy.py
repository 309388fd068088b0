"""A policy of a few thousand weights, its tokenizer, and an engine that is stale and rounded.

Everything is built here, so that the examples need no download and no accelerator.
"""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def policy(*, hidden: int = 32, layers: int = 2) -> LlamaForCausalLM:
    """A random Llama in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


class StaleEngine:
    """A `rollout_func`: samples in bfloat16 from weights that are fetched every few steps."""

    def __init__(self, *, every: int, length: int) -> None:
        """Fetch weights every `every` steps and sample `length` ids for each prompt."""
        self.every, self.length = every, length
        # Built anew, not copied: TRL patches its model, and a copy would still call the original.
        self.exact, self.served = policy(), policy().bfloat16()
        self.version = -1

    @torch.no_grad()
    def __call__(self, prompts, trainer):
        """Completions with their log-probs, version, and scores under that version."""
        now = trainer.state.global_step
        if now % self.every == 0 and now != self.version:
            weights = trainer.model.state_dict()
            self.exact.load_state_dict(weights)
            self.served.load_state_dict(weights)
            self.version = now
        prompt_ids = trainer.processing_class(prompts)["input_ids"]  # of equal length
        start = len(prompt_ids[0])
        ids, logps = torch.tensor(prompt_ids), []
        for _ in range(self.length):
            step = self.served(ids).logits[:, -1].float().log_softmax(-1)
            chosen = step.exp().multinomial(1)
            ids = torch.cat([ids, chosen], 1)
            logps.append(step.gather(1, chosen))
        rows, done = torch.cat(logps, 1), ids[:, start:]
        scored = self.exact(ids).logits[:, start - 1 : -1].log_softmax(-1)
        scored = scored.gather(2, done[..., None]).squeeze(2)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": done.tolist(),
            "logprobs": rows.tolist(),
            "version": [self.version] * len(done),
            "logp_version": scored.tolist(),
        }
