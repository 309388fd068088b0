import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trueup.models.quantization.grids import E2M1, E4M3, INT4, INT8, Grid, power_above, power_below

GRIDS = {"e4m3": E4M3, "e2m1": E2M1, "int8": INT8, "int4": INT4}


def _e4m3(code: int) -> float:
    """Value of a code by the definition of the format: 1 sign, 4 exponent, 3 mantissa bits."""
    sign, exponent, mantissa = -1 if code >> 7 else 1, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


NUMBERS = {
    "e4m3": sorted({_e4m3(code) for code in range(256)} - {math.nan}, key=lambda x: (x != x, x)),
    "e2m1": [-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    "int8": [float(i) for i in range(-127, 128)],
    "int4": [float(i) for i in range(-7, 8)],
}
NUMBERS["e4m3"] = [x for x in NUMBERS["e4m3"] if x == x]


def _rounded(grid: Grid, *values: float) -> list[float]:
    return grid.round_(torch.tensor(values)).tolist()


def test_e4m3_has_253_numbers_up_to_448() -> None:
    assert len(NUMBERS["e4m3"]) == 253
    assert NUMBERS["e4m3"][-1] == 448.0
    assert NUMBERS["e4m3"][127] == 2.0**-9


@pytest.mark.parametrize("name", GRIDS)
def test_numbers_of_the_grid_stay(name: str) -> None:
    assert _rounded(GRIDS[name], *NUMBERS[name]) == NUMBERS[name]


@pytest.mark.parametrize("name", GRIDS)
@given(x=st.floats(-500, 500, width=32))
def test_nothing_on_the_grid_is_nearer(name: str, x: float) -> None:
    (found,) = _rounded(GRIDS[name], x)
    assert found in NUMBERS[name]
    assert abs(x - found) == min(abs(x - number) for number in NUMBERS[name])


@pytest.mark.parametrize(
    ("name", "value", "even"),
    [
        ("e4m3", 17.0, 16.0),  # steps of 2: 16 = 1.000b, 18 = 1.001b
        ("e4m3", 19.0, 20.0),
        ("e4m3", 2.0**-10, 0.0),  # half the smallest subnormal
        ("e4m3", 3 * 2.0**-10, 2.0**-8),
        ("e4m3", 15.5 * 2.0**-10, 2.0**-6),  # from the largest subnormal to the smallest normal
        ("e2m1", 0.25, 0.0),
        ("e2m1", 0.75, 1.0),
        ("e2m1", 2.5, 2.0),
        ("e2m1", 3.5, 4.0),
        ("e2m1", 5.0, 4.0),
        ("int8", 2.5, 2.0),
        ("int8", -3.5, -4.0),
        ("int4", 0.5, 0.0),
    ],
)
def test_ties_go_to_the_even_number(name: str, value: float, even: float) -> None:
    assert _rounded(GRIDS[name], value, -value) == [even, -even]


@pytest.mark.parametrize("name", GRIDS)
def test_what_is_too_large_saturates_and_nan_stays(name: str) -> None:
    grid = GRIDS[name]
    largest = NUMBERS[name][-1]
    assert _rounded(grid, 1e30, math.inf, -math.inf) == [largest, largest, -largest]
    assert math.isnan(_rounded(grid, math.nan)[0])


def _all_halves() -> Tensor:
    """Every bfloat16: 65,536 of them, all exponents, both signs."""
    return torch.arange(1 << 16).sub(1 << 15).to(torch.int16).view(torch.bfloat16).float()


def test_e4m3_is_the_saturating_cast_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(-5, 4, 200_000) * torch.randn(200_000, generator=generator)
    for x in (spread, _all_halves()):
        cast = x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        torch.testing.assert_close(E4M3.round_(x.clone()), cast, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", GRIDS)
def test_bfloat16_holds_every_number_exactly(name: str) -> None:
    numbers = torch.tensor(NUMBERS[name])
    assert torch.equal(numbers.bfloat16().float(), numbers)


def test_powers_at_or_above() -> None:
    x = torch.tensor([1.0, 1.0000001, 1.99, 0.3, 448.0])
    assert power_above(x).tolist() == [1.0, 2.0, 2.0, 0.5, 512.0]


def test_powers_at_or_below() -> None:
    x = torch.tensor([1.0, 1.99, -2.0, 0.3, 448.0])
    assert power_below(x).tolist() == [1.0, 1.0, 2.0, 0.25, 256.0]
