import pytest
import torch

from trueup.diagnostics.grid import grid_refuted, grid_test

SEQUENCE = torch.arange(40) // 8


def engines(share: float, noise: float):
    """log μ that follows a grid by a share, with noise; the trainer says −1."""
    generator = torch.Generator().manual_seed(1)
    own = torch.full((40,), -1.0)
    x, rest = torch.randn(2, 40, generator=generator).double()
    return own, own + 0.2 * x, own + 0.2 * share * x + noise * rest, SEQUENCE


def test_the_slope_is_the_share_of_the_grid_that_the_engine_follows():
    for share in (0.0, 0.5, 1.0):
        found = grid_test(*engines(share, 0.0))
        assert found.slope == pytest.approx(share, abs=1e-5)
        assert found.size == pytest.approx(share, abs=1e-5)


@pytest.mark.parametrize("noise", [1e-7, 0.04])
def test_a_no_op_is_refuted_in_float32_and_in_bfloat16(noise: float):
    assert grid_test(*engines(0.0, noise)).refuted


@pytest.mark.parametrize(("share", "noise"), [(1.0, 0.0), (1.0, 0.04), (0.4, 0.2)])
def test_a_rounding_is_believed_also_where_its_imitation_is_poor(share: float, noise: float):
    assert not grid_test(*engines(share, noise)).refuted


def test_what_is_uncertain_or_undefined_is_not_refuted():
    assert not grid_refuted(0.0, 0.2, 0.3)
    assert not grid_refuted(0.0, 0.0, 0.3)
    assert not grid_refuted(0.0, 0.05, 0.9)
    assert grid_refuted(0.0, 0.05, 0.3)
