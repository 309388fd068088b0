from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from support.gguf_file import SPECIALS, TEMPLATE, WORDS, small_llama, write_gguf
from trueup.errors import CheckpointError
from trueup.models.gguf import GgufModel
from trueup.models.load import load_model

pytest.importorskip("gguf")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def _converted(path: Path) -> Path:
    out = path.with_name("out")
    out.mkdir()
    GgufModel(path).save(out)
    return out


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_that_comes_out_is_the_one_that_went_in(tied: bool, path: Path):
    model = small_llama(tied=tied)
    write_gguf(path, model)
    found = load_model(_converted(path))
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        assert torch.equal(found(input_ids=ids).logits, model(input_ids=ids).logits)
    assert found.config.tie_word_embeddings is tied


def test_weights_are_written_in_bfloat16(path: Path):
    write_gguf(path, small_llama())
    assert {t.dtype for t in GgufModel(path).tensors().values()} == {torch.bfloat16}
    assert load_model(_converted(path), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_block_grid_gives_the_numbers_that_it_stands_for(path: Path):
    from gguf import GGMLQuantizationType

    model = small_llama()
    # Integers up to 127 times a power of two are on the 8-bit grid: a scale and a byte each.
    embedding = torch.randint(-127, 128, (len(WORDS), 32)).float()
    embedding[:, 0] = 127
    model.model.embed_tokens.weight.data = embedding / 64
    write_gguf(path, model, grid={"token_embd.weight": GGMLQuantizationType.Q8_0})
    found = GgufModel(path).tensors()["model.embed_tokens.weight"]
    assert torch.equal(found.float(), (embedding / 64).bfloat16().float())


def test_the_tokenizer_keeps_digits_apart_and_control_tokens_whole(path: Path):
    write_gguf(path, small_llama())
    tokenizer = AutoTokenizer.from_pretrained(_converted(path), local_files_only=True)
    assert tokenizer.tokenize("a a11<|im_end|>") == ["a", "Ġa", "1", "1", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(list(SPECIALS)) == [0, 1, 2]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    text = "ünï 1 a\n  b"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "qwen2"}, "general.architecture must be llama, got 'qwen2'"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre must be smollm, got 'llama-bpe'"),
        ({"scaling": "yarn"}, "llama.rope.scaling.type must be absent, got 'yarn'"),
        ({"context_length": None}, "llama.context_length must be present, got None"),
        ({"extra": ["rope_freqs.weight"]}, "a weight of a Llama, got 'rope_freqs.weight'"),
    ],
)
def test_what_it_would_read_wrong_is_refused(change: dict, message: str, path: Path):
    write_gguf(path, small_llama(), **change)
    with pytest.raises(CheckpointError, match=message):
        _converted(path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no such format" * 9])
def test_a_file_of_another_format_is_refused(content: bytes, path: Path):
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="must be a GGUF file"):
        GgufModel(path)


def test_a_file_that_is_cut_is_refused(path: Path):
    write_gguf(path, small_llama())
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match="must be a GGUF file"):
        _converted(path)


def test_a_missing_package_is_named(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"package gguf must be installed.*trueup\[models\]"):
        GgufModel(path)
