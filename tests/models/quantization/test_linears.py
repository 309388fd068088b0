from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from trueup.models.quantization.linears import Kernel, quantized
from trueup.models.quantization.schemes import SCHEMES

NAMES = sorted(SCHEMES)
SCALED_SUMS = ("fp8", "fp8_row", "int8")
"""Schemes that have a real kernel."""
STACK = (96, 32, 32)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WEIGHT = _numbers(160, 256, seed=0) * torch.logspace(-2, 0, 160)[:, None]
BIAS = _numbers(160, seed=1)
INPUTS = _numbers(24, 256, seed=2) * torch.logspace(-1, 1, 24)[:, None]


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_computes_its_rounded_inputs_times_its_dense_weight(name: str) -> None:
    scheme = SCHEMES[name]
    layer = quantized(WEIGHT, BIAS, scheme, dtype=torch.float32)
    inputs = INPUTS if scheme.activation is None else scheme.activation.rounded(INPUTS)
    expected = inputs.double() @ layer.dense().double().T + scheme.other(BIAS)
    torch.testing.assert_close(layer(INPUTS).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_dense_weight_is_the_rounded_one(name: str) -> None:
    layer = quantized(WEIGHT, None, SCHEMES[name], dtype=torch.float32)
    assert torch.equal(layer.dense(), SCHEMES[name].weight.rounded(WEIGHT))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_have_the_dtype_of_inputs(name: str, dtype: torch.dtype) -> None:
    layer = quantized(WEIGHT, BIAS, SCHEMES[name], dtype=dtype)
    x = INPUTS.to(dtype)
    assert layer(x).dtype is layer.add(layer(x), x).dtype is dtype


@pytest.mark.parametrize("name", NAMES)
def test_neither_argument_of_add_is_changed(name: str) -> None:
    layer = quantized(WEIGHT, BIAS, SCHEMES[name], dtype=torch.float32)
    residual, x = _numbers(24, 160, seed=3), INPUTS.clone()
    before = residual.clone()
    total = layer.add(residual, x)
    torch.testing.assert_close(total, before + layer(INPUTS), rtol=1e-5, atol=1e-5)
    assert torch.equal(residual, before)
    assert torch.equal(x, INPUTS)


@pytest.mark.parametrize("name", NAMES)
def test_a_part_gives_its_columns_of_the_whole(name: str) -> None:
    layer = quantized(WEIGHT, BIAS, SCHEMES[name], dtype=torch.float32, rows=STACK)
    part = layer.part(96, 128)
    torch.testing.assert_close(part(INPUTS), layer(INPUTS)[:, 96:128], rtol=1e-6, atol=1e-6)
    assert torch.equal(part.dense(), layer.dense()[96:128])


@pytest.mark.parametrize("name", NAMES)
def test_stacked_modules_are_rounded_as_if_alone(name: str) -> None:
    whole = quantized(WEIGHT, BIAS, SCHEMES[name], dtype=torch.float32, rows=STACK)
    alone = [
        quantized(weight, bias, SCHEMES[name], dtype=torch.float32)
        for weight, bias in zip(WEIGHT.split(STACK), BIAS.split(STACK), strict=True)
    ]
    assert torch.equal(whole.dense(), torch.cat([layer.dense() for layer in alone]))
    expected = torch.cat([layer(INPUTS) for layer in alone], 1)
    torch.testing.assert_close(whole(INPUTS), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kernel", ["real", "emulated"])
@pytest.mark.parametrize("name", SCALED_SUMS)
def test_real_kernel_and_emulation_hold_the_same_numbers(name: str, kernel: Kernel) -> None:
    layer = quantized(WEIGHT, None, SCHEMES[name], dtype=torch.bfloat16, kernel=kernel)
    assert torch.equal(layer.dense(), SCHEMES[name].weight.rounded(WEIGHT))


@pytest.mark.parametrize("rows", [(), STACK])
@pytest.mark.parametrize("name", SCALED_SUMS)
def test_emulation_differs_from_the_real_kernel_by_the_order_of_a_sum(
    name: str, rows: tuple[int, ...]
) -> None:
    real, emulated = (
        quantized(WEIGHT, BIAS, SCHEMES[name], dtype=torch.float32, rows=rows, kernel=kernel)
        for kernel in ("real", "emulated")
    )
    scale = emulated(INPUTS).norm(dim=1, keepdim=True)
    assert ((real(INPUTS) - emulated(INPUTS)).abs() <= 1e-6 * scale).all()


@pytest.mark.parametrize("name", SCALED_SUMS)
def test_in_bfloat16_emulation_adds_one_rounding(name: str) -> None:
    real, emulated = (
        quantized(WEIGHT, None, SCHEMES[name], dtype=torch.bfloat16, kernel=kernel)
        for kernel in ("real", "emulated")
    )
    x = INPUTS.bfloat16()
    there, here = real(x).float(), emulated(x).float()
    # Two roundings of half a unit each, of numbers up to 2^-7 of themselves apart.
    assert ((there - here).abs() <= 2**-7 * there.abs() + 1e-6).all()


def test_integer_sums_are_exact() -> None:
    """Two tokens of two inputs by hand: scales 1/127 · 127 make every number its own integer."""
    weight = torch.tensor([[127.0, -3.0], [1.0, 127.0]])
    layer = quantized(weight, None, SCHEMES["int8"], dtype=torch.float32)
    x = torch.tensor([[127.0, 2.0], [-127.0, 5.0]])
    expected = [[127 * 127 - 6, 127 + 254], [-127 * 127 - 15, -127 + 635]]
    assert layer(x).tolist() == expected


@pytest.mark.parametrize("name", NAMES)
def test_inputs_of_zeros_give_the_bias(name: str) -> None:
    layer = quantized(WEIGHT, BIAS, SCHEMES[name], dtype=torch.float32)
    assert torch.equal(layer(torch.zeros(3, 256)), SCHEMES[name].other(BIAS).expand(3, -1))


@pytest.mark.parametrize("name", NAMES)
def test_one_token_is_enough(name: str) -> None:
    layer = quantized(WEIGHT, BIAS, SCHEMES[name], dtype=torch.float32)
    assert layer(INPUTS[:1]).shape == (1, 160)


@pytest.mark.parametrize("name", [n for n in NAMES if not SCHEMES[n].one_scale])
def test_a_token_does_not_depend_on_its_neighbours(name: str) -> None:
    layer = quantized(WEIGHT, BIAS, SCHEMES[name], dtype=torch.float32)
    torch.testing.assert_close(layer(INPUTS)[:5], layer(INPUTS[:5]), rtol=1e-6, atol=1e-5)


def test_with_one_scale_for_all_a_token_depends_on_its_neighbours() -> None:
    layer = quantized(WEIGHT, BIAS, SCHEMES["fp8"], dtype=torch.float32)
    assert not torch.allclose(layer(INPUTS)[:5], layer(INPUTS[:5]), rtol=1e-3)


def test_weights_are_rounded_from_what_arrives_not_from_the_dtype_of_the_layer() -> None:
    scheme = SCHEMES["int8"]
    layer = quantized(WEIGHT, None, scheme, dtype=torch.bfloat16)
    assert torch.equal(layer.dense(), scheme.weight.rounded(WEIGHT))
    assert not torch.equal(layer.dense(), scheme.weight.rounded(WEIGHT.bfloat16().float()))


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_is_left_as_it_was(name: str) -> None:
    weight = WEIGHT.clone()
    quantized(weight, None, SCHEMES[name], dtype=torch.float32)(INPUTS)
    assert torch.equal(weight, WEIGHT)


def test_nan_in_an_input_is_nan_in_the_output() -> None:
    x = INPUTS.clone()
    x[3, 7] = torch.nan
    for name in ("fp8", "fp8_row", "fp8_block", "mxfp8", "int8", "fp4"):
        layer = quantized(WEIGHT, None, SCHEMES[name], dtype=torch.float32)
        assert layer(x)[3].isnan().all(), name
