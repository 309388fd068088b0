import pytest
import torch

from trueup.diagnostics.repetition import explained


def test_by_hand() -> None:
    """Variances of {1, −1, 3, −3} and of {1, −1, 1, −1} are 5 and 1: 80 % are explained."""
    gap, left = torch.tensor([1.0, -1.0, 3.0, -3.0]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    found = explained(gap, left)
    assert found.tokens == 4
    assert found.variance == 5.0
    assert found.share == pytest.approx(0.8)
    assert found.verdict == "explains 80% of the engine's variance"


def test_a_constant_residual_is_a_shift_and_explains_all() -> None:
    assert explained(torch.tensor([1.0, -1.0]), torch.full((2,), 0.3)).share == 1.0


@pytest.mark.parametrize(
    ("left", "separable"), [(0.0, True), (0.49, True), (0.51, False), (1.0, False), (1.1, False)]
)
def test_half_of_the_variance_is_needed(left: float, separable: bool) -> None:
    gap = torch.randn(100, generator=torch.Generator().manual_seed(0))
    found = explained(gap, gap * left**0.5)
    assert found.share == pytest.approx(1 - left)
    assert found.separable is separable
    assert found.verdict.startswith("not separable") is not separable


@pytest.mark.parametrize("num", [0, 3])
def test_nothing_is_explained_where_there_is_no_gap(num: int) -> None:
    found = explained(torch.zeros(num), torch.zeros(num))
    assert found.share == 0.0
    assert not found.separable
