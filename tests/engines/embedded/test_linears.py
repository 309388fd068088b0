"""Every exact layer against the plain product."""

import pytest
import torch
from torch.nn.functional import linear

from trueup.engines.embedded.linears import Packed, exact
from trueup.models.dense import Dense
from trueup.models.linear import Linear


@pytest.mark.parametrize("kind", [Dense, Packed])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.25)])
def test_layers_compute_the_product(
    kind: type[Linear], biased: bool, dtype: torch.dtype, tolerance: float
) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=draw).to(dtype)
    bias = torch.randn(96, generator=draw).to(dtype) if biased else None
    x, residual = torch.randn(5, 64, generator=draw).to(dtype), torch.ones(5, 96).to(dtype)
    layer = kind(weight, bias)  # type: ignore[call-arg]
    expected = linear(x.double(), weight.double(), None if bias is None else bias.double())
    kept = residual.clone()
    torch.testing.assert_close(layer(x).double(), expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(
        layer.add(residual, x).double(), expected + 1, atol=tolerance, rtol=0
    )
    assert torch.equal(residual, kept)
    part = layer.part(32, 80)
    torch.testing.assert_close(part(x).double(), expected[:, 32:80], atol=tolerance, rtol=0)
    assert torch.equal(layer.dense(), weight)
    assert torch.equal(part.dense(), weight[32:80])


def test_only_large_weights_are_repacked() -> None:
    assert isinstance(exact(torch.zeros(64, 64), None), Dense)
    assert isinstance(exact(torch.zeros(512, 512), None), Packed)
