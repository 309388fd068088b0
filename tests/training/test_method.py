import pytest
import torch

from support.gaps import make_gap, ratio_gap
from trueup import config
from trueup.corrections.adaptive import adaptive
from trueup.corrections.compose import correct
from trueup.training.method import Method

ROWS = [[0.4, -0.2, 0.1], [-0.3, 0.0], [0.9, 0.2], [-1.0, 0.05, 0.3]]
NEXT = [[0.1, 0.05, 0.02, 0.41], [-0.6, 0.2, 0.0], [1.4], [-0.1, 0.2, -0.2]]


def method(*overrides: str) -> Method:
    return Method(config.load("", ["train.minibatches=1", *overrides]))


def test_it_corrects_as_the_configuration_says():
    found = method(
        "correction.preset=mis",
        "correction.params.high=1.3",
        "train.advantage=group",
        "correction.denominator=kept",
    )(ratio_gap(ROWS))
    expected = correct(
        ratio_gap(ROWS), preset="mis", params={"high": 1.3}, advantage="group", denominator="kept"
    )
    for name in ("advantages", "weight", "keep", "counts"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert found.denominator == expected.denominator
    assert dict(found.metrics) == dict(expected.metrics)


def test_in_bypass_mode_a_filter_rejects_and_nothing_weighs():
    """C7: the ratio to the behaviour is inside the clip; a weight would count it twice."""
    for preset in ("none", "mis", "tis"):
        made = method("train.mode=bypass", f"correction.preset={preset}")(ratio_gap(ROWS))
        assert torch.equal(made.weight, made.keep.float())
    rejecting = ("correction.preset=mis", "correction.params.high=1.3")
    bypass = method("train.mode=bypass", *rejecting)(ratio_gap(ROWS))
    decoupled = method(*rejecting)(ratio_gap(ROWS))
    assert not bypass.keep.all()
    assert torch.equal(bypass.keep, decoupled.keep)
    assert bypass.denominator == decoupled.denominator


FRESH, STALE = None, [[0, 0, 1], [0, 0], [0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("lags", "floor", "off"), [(FRESH, 0.4, True), (FRESH, 0.3, False), (STALE, 0.4, False)]
)
def test_a_fresh_batch_at_the_floor_is_not_corrected_and_it_is_said(lags, floor, off):
    """mean |d| = 3.45 / 10"""
    gap = ratio_gap(ROWS, lags=lags)
    made = method("correction.preset=mis", f"correction.off_below={floor}")(gap)
    assert made.metrics["correction/off"].mean == off
    assert bool((made.weight == 1).all()) == off
    assert "correction/off" not in method("correction.preset=mis")(gap).metrics


GATED = ["correction.preset=ais", "correction.preset=m2po", "correction.normalize=true"]


@pytest.mark.parametrize("chosen", GATED)
def test_the_first_batch_decides_for_itself_and_the_second_by_the_first(chosen):
    later = method(chosen, "correction.gate=previous")
    now = method(chosen)
    first, second = ratio_gap(ROWS), ratio_gap(NEXT)
    assert not later.fuses
    assert torch.equal(later(first).weight, now(first).weight)
    assert later.fuses
    given, own = later(second), now(second)
    assert not torch.equal(given.weight, own.weight)
    assert given.metrics["gate/error"].mean == pytest.approx(
        float((given.weight - own.weight).abs().double().mean())
    )


def test_the_gate_of_ais_is_its_alpha():
    later = method("correction.preset=ais", "correction.gate=previous", "train.advantage=group")
    gap = ratio_gap(ROWS)
    made = later(gap)
    alpha = adaptive(gap.log_ratio, made.advantages, cap=5.0, delta=0.02, gamma=1.2, beta=1.0).alpha
    assert made.gates == {"ais": pytest.approx(alpha.item())}
    weight = later(ratio_gap(NEXT)).weight
    ratio = ratio_gap(NEXT).log_ratio.exp()
    torch.testing.assert_close(weight, (1 + alpha * (ratio - 1)).float())


def test_the_gate_of_m2po_is_the_least_square_that_goes():
    """d² in order: 0 ... .09 .16 .81 1: the means reach .04 with .16 (.365 / 8 = .046)."""
    later = method("correction.preset=m2po", "correction.gate=previous")
    made = later(ratio_gap(ROWS))
    assert made.gates["m2po"] == pytest.approx(0.16)
    assert int((~made.keep).sum()) == 3
    assert torch.equal(later(ratio_gap(NEXT)).keep, ratio_gap(NEXT).log_ratio.square() < 0.16)


def test_with_a_given_gate_a_part_is_corrected_like_the_whole():
    for chosen in GATED:
        later = method(chosen, "correction.gate=previous")
        later(ratio_gap(ROWS))
        gap = ratio_gap(NEXT)
        known = torch.ones(4, dtype=torch.bool)
        tokens = torch.tensor([0, 1, 5, 7])
        part = later.part(gap.select(tokens), known)
        whole = later(gap)
        assert torch.equal(part.weight, whole.weight[tokens])
        assert torch.equal(part.keep, whole.keep[tokens])
        assert torch.equal(part.advantages, whole.advantages[tokens])


def test_an_off_switch_of_the_step_before_needs_no_second_pass():
    later = method("correction.off_below=0.4", "correction.gate=previous")
    assert later.scope == "batch"
    assert (later(ratio_gap(ROWS)).weight == 1).all()
    assert later.scope == "token"
    beyond = ratio_gap([[2.0], [-2.0]])
    assert (later(beyond).weight == 1).all()  # decided by the first
    assert not (later(beyond).weight == 1).all()  # decided by the second


def test_a_batch_without_a_kept_token_leaves_a_gate_that_can_be_used():
    later = method("correction.preset=ais", "correction.gate=previous")
    later(make_gap([[], []], [[], []]))
    assert later(ratio_gap(ROWS)).weight.isfinite().all()
