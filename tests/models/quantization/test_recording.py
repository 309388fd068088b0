import pytest
import torch
from torch import Tensor

from trueup.models.quantization.linears import quantized
from trueup.models.quantization.recording import Recorder, Repetition
from trueup.models.quantization.schemes import SCHEMES

FP8 = SCHEMES["fp8"]
MODULES = ("q", "k", "v", "o")
ROWS = (16, 8, 8)


def _numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_each_module_of_a_stack_is_recorded_with_the_scale_that_they_share() -> None:
    recorder = Recorder(MODULES)
    qkv = quantized(
        _numbers(32, 64, seed=0),
        None,
        FP8,
        dtype=torch.float32,
        rows=ROWS,
        tap=recorder.tap(MODULES[:3], ROWS),
    )
    out = quantized(
        _numbers(64, 16, seed=1),
        None,
        FP8,
        dtype=torch.float32,
        tap=recorder.tap(MODULES[3:], (64,)),
    )
    x = torch.zeros(2, 64)
    x[1, 3] = -448.0
    attended = qkv(x)[:, :16].clone()
    attended[0, 0] = 2 * 448.0
    out(attended)
    assert recorder.take().tolist() == [1.0, 1.0, 1.0, 2.0]


def test_a_part_of_a_layer_is_recorded_for_its_modules_only() -> None:
    recorder = Recorder(MODULES[:3])
    layer = quantized(
        _numbers(32, 64, seed=0),
        None,
        FP8,
        dtype=torch.float32,
        rows=ROWS,
        tap=recorder.tap(MODULES[:3], ROWS),
    )
    layer.part(16, 32).part(8, 16)(torch.full((1, 64), 3 * 448.0))
    layer.part(16, 24)(torch.full((1, 64), 2 * 448.0))
    layer.part(0, 16)(torch.full((1, 64), 448.0))
    assert recorder.take().tolist() == [1.0, 2.0, 3.0]


def test_a_layer_that_has_not_run_is_no_record() -> None:
    recorder = Recorder(("o",))
    tap = recorder.tap(("o",), (4,))
    tap(torch.tensor(1.0))
    assert recorder.take().tolist() == [1.0]
    with pytest.raises(AssertionError, match="every layer has run"):
        recorder.take()


def test_recording_changes_nothing() -> None:
    weight, x = _numbers(32, 64, seed=0), _numbers(5, 64, seed=1)
    tap = Recorder(("o",)).tap(("o",), (32,))
    watched = quantized(weight, None, FP8, dtype=torch.float32, tap=tap)
    assert torch.equal(watched(x), quantized(weight, None, FP8, dtype=torch.float32)(x))


def test_repeated_scales_give_tokens_what_they_had_in_another_batch() -> None:
    weight, x = _numbers(32, 64, seed=0), _numbers(6, 64, seed=1)
    x[5] *= 20  # decides the scale of all
    recorder, repetition = Recorder(("o",)), Repetition()
    engine = quantized(weight, None, FP8, dtype=torch.float32, tap=recorder.tap(("o",), (32,)))
    sampled = engine(x)
    trainer = quantized(weight, None, FP8, dtype=torch.float32, tap=repetition.tap(0))
    assert not torch.allclose(trainer(x[:3]), sampled[:3], rtol=1e-3)
    repetition.scales = recorder.take().expand(3, 1)
    torch.testing.assert_close(trainer(x[:3]), sampled[:3], rtol=1e-6, atol=1e-5)


def test_a_token_without_a_recorded_scale_has_that_of_its_own_forward() -> None:
    repetition = Repetition()
    tap = repetition.tap(1)
    own = torch.tensor(5.0)
    repetition.scales = torch.tensor([[0.0, 2.0], [0.0, torch.nan]])
    assert tap(own).tolist() == [[2.0], [5.0]]
    assert tap.part(0, 1)(own).tolist() == [[2.0], [5.0]]
