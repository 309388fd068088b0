from typing import get_args

import pytest
import torch

from trueup.config import EngineConfig
from trueup.errors import ConfigError
from trueup.models.quantization.schemes import SCHEMES, scheme


def test_the_names_are_those_of_the_configuration() -> None:
    names = get_args(EngineConfig.model_fields["quantize"].annotation)
    assert {"none", *SCHEMES} == set(names)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"engine.quantize must be one of .*'fp8_row'.*got 'int3'"
    ):
        scheme("int3")


def test_only_per_tensor_activations_share_a_scale() -> None:
    assert [name for name, found in SCHEMES.items() if found.one_scale] == ["fp8"]


@pytest.mark.parametrize("name", SCHEMES)
def test_other_parameters_stay_unless_everything_is_rounded(name: str) -> None:
    norm = torch.tensor([1.0, 1.07, 17.0])
    kept = norm.clone()
    expected = [1.0, 1.125, 16.0] if name == "fp8_cast_all" else kept.tolist()
    assert SCHEMES[name].other(norm).tolist() == expected
    assert torch.equal(norm, kept)
