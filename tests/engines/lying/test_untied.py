import pytest
import torch

from support.embedded import reference_logps, tiny
from trueup.engines.lying import untied
from trueup.errors import CheckpointError
from trueup.models.load import load_model, save_model, state_tensors


def test_an_untied_copy_computes_the_same_with_a_head_of_its_own(tmp_path):
    model = tiny("llama-gqa-tied-bias")
    save_model(model, tmp_path / "tied")
    copy = load_model(untied(tmp_path / "tied", tmp_path / "copy"))
    names = state_tensors(copy).keys() - state_tensors(model).keys()
    assert names == {"lm_head.weight"}
    ids = [5, 6, 7]
    assert torch.equal(reference_logps(copy, [1, 2], ids), reference_logps(model, [1, 2], ids))


def test_an_untied_model_is_left_where_it_is(tmp_path):
    save_model(tiny(), tmp_path / "model")
    assert untied(tmp_path / "model", tmp_path / "copy") == tmp_path / "model"
    assert not (tmp_path / "copy").exists()


def test_a_directory_without_safetensors_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        untied(tmp_path, tmp_path / "copy")
