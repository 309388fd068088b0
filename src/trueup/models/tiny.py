"""TinyAgent: a stock Llama of about 160 thousand parameters with a word-level tokenizer.

It is an ordinary Hugging Face model in an ordinary Hugging Face directory, so whatever trains,
serves or exports it works unchanged for a large one. Its vocabulary is closed: a word that it does
not know is an error, never a silent `<unk>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.errors import DataError
from trueup.models.chat import Roles

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM

PAD, EOS, USER, AGENT, ENV, END = SPECIALS = (
    "<pad>",
    "<eos>",
    "<user>",
    "<agent>",
    "<env>",
    "<end>",
)

_HIDDEN = 64
_LAYERS = 3
_HEADS = 4
_INTERMEDIATE = 176
_POSITIONS = 256
_INITIAL_STD = 0.06
"""The stock 0.02 is meant for wide layers: at 64 some seeds then never learn to use what they read
within the fine-tuning of `training.base_policy`."""


def tiny_config(vocab_size: int) -> LlamaConfig:
    """The architecture of TinyAgent.

    Args:
        vocab_size: Words and special tokens; the specials are the last ones.
    """
    from transformers import LlamaConfig

    first_special = vocab_size - len(SPECIALS)
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=_HIDDEN,
        intermediate_size=_INTERMEDIATE,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        max_position_embeddings=_POSITIONS,
        initializer_range=_INITIAL_STD,
        tie_word_embeddings=False,
        pad_token_id=first_special + SPECIALS.index(PAD),
        bos_token_id=None,
        eos_token_id=first_special + SPECIALS.index(EOS),
        dtype="float32",
    )


def build_tiny(vocab_size: int, seed: int) -> LlamaForCausalLM:
    """A freshly initialised TinyAgent in float32; equal seeds give equal weights.

    The global random state is left as it was.
    """
    import torch
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(tiny_config(vocab_size))
    model.train(False)
    return model


def build_tokenizer(words: Sequence[str], directory: Path) -> int:
    """Write a word-level tokenizer and its roles into a model directory.

    The words get the ids 0, 1, ... in the order given, the special tokens the ids after them. The
    specials are no words: the text `<end>` in what the world says cannot become the token.

    Args:
        words: The closed vocabulary: distinct, not empty, without white space, none a special.
        directory: An existing directory; gets `tokenizer.json` and its companions.

    Returns:
        The vocabulary size, specials included.

    Raises:
        DataError: A word is repeated or malformed.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(words)}
    if len(vocabulary) != len(words):
        twice = next(word for index, word in enumerate(words) if vocabulary[word] != index)
        raise DataError(field="words", rule="distinct", value=twice)
    for word in words:
        if word.split() != [word] or word in SPECIALS:
            raise DataError(
                field="words", rule="without white space and no special token", value=word
            )
    tokenizer = Tokenizer(WordLevel(vocabulary))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIALS))
    fast: Any = PreTrainedTokenizerFast
    fast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[USER, AGENT, ENV, END],
        model_max_length=_POSITIONS,
    ).save_pretrained(directory)
    Roles(user=USER, agent=AGENT, env=ENV, end=END).save(directory)
    return len(words) + len(SPECIALS)
