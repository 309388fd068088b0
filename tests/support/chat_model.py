"""A small language model with a byte-level tokenizer and a chat template, which answers in digits.

It is random but for its bias: digits and the end of a turn are likely, all else is not. So it says
numbers of a few digits, which an arithmetic grader rates differently.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from support.gguf_file import ALPHABET, SPECIALS, TEMPLATE, small_llama
from trueup.models.load import save_model

_CONSTANT = 4.0
"""One hidden dimension is the same everywhere, so the head's weight for it is a bias."""
_LIKELY = 2.5


def chat_model(directory: Path) -> Path:
    """Write one."""
    tokens = [*SPECIALS, *ALPHABET]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    model = small_llama(tied=False)
    likely = [tokens.index(token) for token in ("<|im_end|>", *"0123456789")]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = _CONSTANT
        model.lm_head.weight[:, 0] = -_LIKELY
        model.lm_head.weight[likely, 0] = _LIKELY

    def write_tokenizer(work: Path) -> None:
        tokenizer.save(str(work / "tokenizer.json"))
        (work / "chat_template.jinja").write_text(TEMPLATE)

    save_model(model, directory, also=write_tokenizer)
    return directory
