import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trueup.errors import CheckpointError, DataError
from trueup.models.chat import Renderer
from trueup.models.directory import MANIFEST
from trueup.models.load import (
    borrowed_state,
    load_model,
    load_state,
    save_model,
    state_tensors,
)
from trueup.models.tiny import build_tiny


def _tied() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=13,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            tie_word_embeddings=True,
        )
    )


def test_saving_and_loading_gives_the_same_model_and_tokenizer(model_dir: Path):
    loaded, built = load_model(model_dir), build_tiny(13, seed=0)
    assert not loaded.training
    assert state_tensors(loaded).keys() == state_tensors(built).keys()
    for name, tensor in state_tensors(built).items():
        assert torch.equal(state_tensors(loaded)[name], tensor)
    assert Renderer.load(model_dir).vocab_size == 13


def test_the_dtype_is_that_of_every_tensor(model_dir: Path):
    tensors = state_tensors(load_model(model_dir, dtype=torch.bfloat16))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_tied_weights_appear_once_and_stay_tied_through_a_directory(tmp_path: Path):
    save_model(_tied(), tmp_path / "tied")
    loaded = load_model(tmp_path / "tied")
    assert "model.embed_tokens.weight" in state_tensors(loaded)
    assert "lm_head.weight" not in state_tensors(loaded)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_state_shares_memory_with_the_model_and_loading_copies_into_it():
    source, sink = build_tiny(13, seed=0), build_tiny(13, seed=1)
    places = {name: tensor.data_ptr() for name, tensor in state_tensors(sink).items()}
    load_state(sink, state_tensors(source))
    for name, tensor in state_tensors(sink).items():
        assert torch.equal(tensor, state_tensors(source)[name])
        assert tensor.data_ptr() == places[name] != state_tensors(source)[name].data_ptr()


def test_borrowed_tensors_are_computed_with_and_given_back_without_a_copy():
    model, other = _tied(), _tied()
    ids = torch.arange(4)[None]
    own, theirs = state_tensors(model), state_tensors(other)
    places = {name: tensor.data_ptr() for name, tensor in own.items()}
    before, expected = model(ids).logits, other(ids).logits
    with borrowed_state(model, theirs):
        assert torch.equal(model(ids).logits, expected)
        assert all(
            tensor.data_ptr() == theirs[name].data_ptr()
            for name, tensor in state_tensors(model).items()
        )
        assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {name: tensor.data_ptr() for name, tensor in state_tensors(model).items()} == places
    assert torch.equal(model(ids).logits, before)
    assert not torch.equal(before, expected)


def test_borrowed_tensors_are_given_back_after_an_error():
    model = _tied()
    before = {name: tensor.data_ptr() for name, tensor in state_tensors(model).items()}
    with pytest.raises(KeyError), borrowed_state(model, state_tensors(_tied())):
        raise KeyError
    assert {name: tensor.data_ptr() for name, tensor in state_tensors(model).items()} == before


@pytest.mark.parametrize("take", [load_state, lambda *given: borrowed_state(*given).__enter__()])
@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "dtype"])
def test_a_wrong_set_of_tensors_changes_nothing(fault: str, take: Callable[..., object]):
    sink = build_tiny(13, seed=1)
    before = {name: tensor.clone() for name, tensor in state_tensors(sink).items()}
    tensors = dict(state_tensors(build_tiny(13, seed=0)))
    last = list(tensors)[-1]
    match fault:
        case "missing":
            del tensors[last]
        case "unknown":
            tensors["extra"] = torch.zeros(1)
        case "shape":
            tensors[last] = tensors[last][:-1]
        case "dtype":
            tensors[last] = tensors[last].double()
    with pytest.raises(DataError, match="tensor"):
        take(sink, tensors)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_tensors(sink).items())


def _damaged(model_dir: Path, tmp_path: Path, *, sealed: bool) -> Path:
    target = tmp_path / "damaged"
    shutil.copytree(model_dir, target)
    if not sealed:
        (target / MANIFEST).unlink()
    return target


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_any_flipped_bit_of_our_own_directory_is_found(name: str, model_dir: Path, tmp_path: Path):
    path = _damaged(model_dir, tmp_path, sealed=True)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        load_model(path)


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.999, None])
def test_a_truncated_or_missing_file_is_refused(
    name: str, keep: float | None, sealed: bool, model_dir: Path, tmp_path: Path
):
    path = _damaged(model_dir, tmp_path, sealed=sealed)
    content = (path / name).read_bytes()
    (path / name).unlink()
    if keep is not None:
        (path / name).write_bytes(content[: max(0, int(keep * len(content)) - 1)])
    with pytest.raises(CheckpointError):
        load_model(path)


def test_a_missing_tensor_is_refused_rather_than_initialised(model_dir: Path, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    path = _damaged(model_dir, tmp_path, sealed=False)
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing_keys must be empty.*lm_head"):
        load_model(path)


def test_a_pickle_is_not_read(model_dir: Path, tmp_path: Path):
    path = _damaged(model_dir, tmp_path, sealed=False)
    (path / "model.safetensors").unlink()
    torch.save(build_tiny(13, seed=0).state_dict(), path / "pytorch_model.bin")
    with pytest.raises(CheckpointError):
        load_model(path)


def test_a_path_that_is_no_directory_is_refused_without_asking_the_network(tmp_path: Path):
    for path in (tmp_path / "nowhere", Path("gpt2")):
        with pytest.raises(CheckpointError, match="an existing directory"):
            load_model(path)
