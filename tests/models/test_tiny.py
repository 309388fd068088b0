from pathlib import Path

import pytest
import torch

from trueup.errors import DataError
from trueup.models.tiny import SPECIALS, build_tiny, build_tokenizer


def test_the_model_has_about_160_thousand_parameters():
    # 3 layers of 4·64² + 3·64·176 + 2·64, a final norm of 64, and 80·64 twice (untied)
    assert sum(p.numel() for p in build_tiny(80, seed=0).parameters()) == 161_216


def test_equal_seeds_give_equal_weights_and_leave_the_global_random_state():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    one, same, other = (build_tiny(13, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_words_come_first_and_specials_last(tmp_path: Path):
    from transformers import AutoTokenizer

    assert build_tokenizer(("fix", "x"), tmp_path) == 2 + len(SPECIALS) == 8
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert tokenizer.convert_tokens_to_ids(["fix", "x", *SPECIALS]) == list(range(8))
    config = build_tiny(8, seed=0).config
    assert (config.pad_token_id, config.eos_token_id) == (2, 3)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (2, 3)


@pytest.mark.parametrize("words", [("x", "x"), ("a b",), ("",), ("<end>",)])
def test_malformed_words_are_refused(words: tuple[str, ...], tmp_path: Path):
    with pytest.raises(DataError, match="words must be"):
        build_tokenizer(words, tmp_path)
