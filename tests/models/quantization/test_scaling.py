import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trueup.models.quantization.grids import E2M1, E4M3, INT4, INT8, Grid
from trueup.models.quantization.scaling import ROW, TENSOR, Blocks, Quantizer

X = torch.tensor([[0.9, -2.0, 0.5, 4.0], [8.0, 0.25, -16.0, 1.0]])
GROUPS = Blocks(rows=1, columns=2)


@pytest.mark.parametrize(
    ("blocks", "largest"),
    [
        (TENSOR, 16.0),
        (ROW, [[4.0], [16.0]]),
        (GROUPS, [[2.0, 4.0], [8.0, 16.0]]),
        (Blocks(rows=2, columns=2), [[8.0, 16.0]]),
        (Blocks(rows=2, columns=3), [[16.0, 4.0]]),  # the last block is one column wide
        (Blocks(rows=128, columns=128), [[16.0]]),
    ],
)
def test_the_largest_magnitude_of_a_block_becomes_the_largest_number(
    blocks: Blocks, largest: object
) -> None:
    scales = Quantizer(INT8, blocks).scales(X)
    assert torch.equal(scales, torch.tensor(largest) / 127)


def test_one_scale_for_the_tensor_by_hand() -> None:
    """s = 16/127: 1/s = 7.9375, so the first row is 7.1 → 7, −15.9 → −16, 3.97 → 4, 31.75 → 32."""
    quantizer = Quantizer(INT8)
    values = quantizer.quantize(X, quantizer.scales(X))
    assert values.tolist() == [[7, -16, 4, 32], [64, 2, -127, 8]]  # 63.5 → 64 and 1.98 → 2


def test_groups_by_hand() -> None:
    """Scales 2/7, 4/7, 8/7, 16/7: each group's largest is ±7, 0.9/(2/7) = 3.15, .5/(4/7) = .875."""
    quantizer = Quantizer(INT4, GROUPS)
    values = quantizer.quantize(X, quantizer.scales(X))
    assert values.tolist() == [[3, -7, 1, 7], [7, 0, -7, 0]]


@pytest.mark.parametrize(
    ("grid", "amax", "scale"),
    [
        (E4M3, 448.0, 1.0),
        (E4M3, 449.0, 2.0),
        (E4M3, 0.875, 2.0**-9),  # 448 · 2^-9
        (E4M3, 1.0, 2.0**-8),
        (E2M1, 6.0, 1.0),
        (E2M1, 7.0, 2.0),
        (E2M1, 3.0, 0.5),
    ],
)
def test_a_power_of_two_is_the_least_that_saturates_nothing(
    grid: Grid, amax: float, scale: float
) -> None:
    quantizer = Quantizer(grid, Blocks(rows=1, columns=32), "power_of_two")
    x = torch.zeros(1, 32)
    x[0, 5] = -amax
    assert quantizer.scales(x).tolist() == [[scale]]


def test_powers_of_two_leave_bfloat16_exact() -> None:
    quantizer = Quantizer(E4M3, Blocks(rows=1, columns=32), "power_of_two")
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(0))
    rounded = quantizer.rounded(x)
    assert torch.equal(rounded.bfloat16().float(), rounded)


def test_without_a_scale_numbers_are_cast() -> None:
    quantizer = Quantizer(E4M3, scale="one")
    assert quantizer.rounded(torch.tensor([[1000.0, 17.0, 1e-4]])).tolist() == [[448.0, 16.0, 0.0]]


@pytest.mark.parametrize("scale", ["fit", "power_of_two", "one"])
def test_zeros_stay_zeros(scale: str) -> None:
    quantizer = Quantizer(E4M3, Blocks(rows=1, columns=32), scale)
    assert torch.equal(quantizer.rounded(torch.zeros(2, 40)), torch.zeros(2, 40))


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    block=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    seed=st.integers(0, 100),
)
def test_a_tensor_of_blocks_is_rounded_block_by_block(
    rows: int, columns: int, block: tuple[int, int], seed: int
) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    found = Quantizer(INT8, Blocks(*block)).rounded(x)
    alone = Quantizer(INT8)
    for top in range(0, rows, block[0]):
        for left in range(0, columns, block[1]):
            part = (slice(top, top + block[0]), slice(left, left + block[1]))
            assert torch.equal(found[part], alone.rounded(x[part].contiguous()))


@given(power=st.integers(-20, 20), seed=st.integers(0, 100))
def test_fitted_rounding_commutes_with_powers_of_two(power: int, seed: int) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed))
    quantizer = Quantizer(E4M3, ROW)
    assert torch.equal(quantizer.rounded(x * 2.0**power), quantizer.rounded(x) * 2.0**power)


def test_the_error_is_at_most_half_a_step() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    quantizer = Quantizer(INT8, ROW)
    step = x.abs().amax(1, keepdim=True) / 127
    assert ((quantizer.rounded(x) - x).abs() <= step / 2 * (1 + 1e-5)).all()
