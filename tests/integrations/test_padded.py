import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.corrections import compose
from trueup.corrections.table import PRESETS
from trueup.errors import ConfigError, DataError
from trueup.integrations import apply
from trueup.integrations.padded import UNKNOWN_VERSION, Layout, pack

JUNK = (math.nan, math.inf, -math.inf, 1e30, 0.0)
"""What positions without action token may hold."""

T = torch.tensor
TURN = T([[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 0], [0, 1, 1, 2]])
MASK = T([[0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]])


def batch(spread=0.5, seed=0, mask=MASK, junk=math.nan):
    gen = torch.Generator().manual_seed(seed)
    target = -2 + 0.5 * torch.randn(mask.shape, generator=gen)
    behaviour = (target + spread * torch.randn(mask.shape, generator=gen)).clamp(max=-0.01)
    blank = mask == 0
    return target.masked_fill(blank, junk), behaviour.masked_fill(blank, junk)


@st.composite
def masks(draw):
    rows, width = draw(st.integers(0, 5)), draw(st.integers(0, 7))
    flags = draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width))
    return torch.tensor(flags, dtype=torch.bool).view(rows, width)


@given(masks(), st.sampled_from(JUNK))
def test_packing_then_unpacking_keeps_action_tokens_and_fills_the_rest(mask, junk):
    values = torch.randn(mask.shape).masked_fill(~mask, junk)
    layout = Layout.of(mask)
    packed = layout.pack(values, field="x")
    assert torch.equal(packed, values[mask])
    assert torch.equal(layout.unpack(packed, fill=7.0), values.masked_fill(~mask, 7.0))
    assert torch.equal(layout.pack(layout.unpack(packed), field="x"), packed)


@given(masks())
def test_a_value_of_a_row_reaches_each_of_its_tokens(mask):
    rows = torch.arange(mask.shape[0])
    assert torch.equal(Layout.of(mask).pack(rows, field="x"), mask.nonzero()[:, 0])


@given(masks(), st.sampled_from([torch.bool, torch.int32, torch.int64, torch.float32]))
def test_a_mask_of_any_dtype_says_the_same(mask, dtype):
    assert torch.equal(Layout.of(mask.to(dtype)).position, Layout.of(mask).position)


@settings(max_examples=40)
@given(st.integers(0, 2**16), st.sampled_from(JUNK), st.sampled_from(sorted(PRESETS)))
def test_nothing_outside_the_action_tokens_reaches_any_result(seed, junk, preset):
    adv = T([1.0, -1.0, 0.5, 0.25])

    def run(filling):
        target, behaviour = batch(seed=seed, junk=filling)
        return apply(adv, target=target, behaviour=behaviour, mask=MASK, preset=preset, turn=TURN)

    clean, dirty = run(-1.0), run(junk)
    for name in ("advantages", "unweighted", "weight", "keep"):
        assert torch.equal(getattr(clean, name), getattr(dirty, name))
        assert not getattr(dirty, name)[MASK == 0].any()
    assert clean.metrics == dirty.metrics


@pytest.mark.parametrize("preset", PRESETS)
def test_it_is_the_correction_of_the_packed_gap(preset):
    """Row by row: what `correct` decides on rewards whose group advantages are the given ones."""
    target, behaviour = batch()
    reward, group = T([3.0, 1.0, 9.0, 2.0]), T([0, 0, 1, 0])
    layout = Layout.of(MASK)
    given = {"target": target, "behaviour": behaviour, "group": group, "turn": TURN}
    gap = pack(layout, **given, reward=reward)
    whole = compose.correct(gap, preset=preset, advantage="group", zero_variance="keep")
    # r − 2 in group 0; the row of group 1 has no tokens.
    made = apply(T([1.0, -1.0, 0.0, 0.0]), mask=MASK, preset=preset, **given)
    assert torch.equal(made.weight, layout.unpack(whole.weight))
    assert torch.equal(made.keep, layout.unpack(whole.keep, fill=False))
    assert torch.allclose(made.unweighted, layout.unpack(whole.advantages))
    kept = torch.where(whole.keep, whole.weight * whole.advantages, 0.0)
    assert torch.allclose(made.advantages, layout.unpack(kept))


def test_weights_by_hand():
    made = apply(
        T([2.0, -1.0]),
        target=T([[-1.0, -1.0], [-1.0, math.nan]]),
        behaviour=T([[-1.0 - math.log(4), -1.0], [-1.0 + math.log(2), 0.0]]),
        mask=T([[1, 1], [1, 0]]),
        preset="tis",  # min(4, 2) = 2, 1; 1/2
    )
    assert torch.allclose(made.weight, T([[2.0, 1.0], [0.5, 0.0]]))
    assert torch.allclose(made.advantages, T([[4.0, 2.0], [-0.5, 0.0]]))
    assert made.metrics["weight/raw"].max == pytest.approx(4)
    assert made.metrics["weight/applied"].max == 2


def test_advantages_of_tokens_are_weighted_one_by_one():
    zeros = torch.zeros(1, 3)
    made = apply(
        T([[0.5, -2.0, 9.0]]),
        target=zeros - 1,
        behaviour=T([[-1.0, -1.0 - math.log(2), -1.0]]),
        mask=T([[1, 1, 0]]),
        preset="tis",
    )
    assert torch.allclose(made.advantages, T([[0.5, -4.0, 0.0]]))


def test_without_a_gap_advantages_are_unchanged_bit_for_bit():
    everywhere = torch.ones(4, 4)
    target, _ = batch(mask=everywhere)
    adv, group = torch.randn(4), T([0] * 4)
    made = apply(adv, target=target, behaviour=target, mask=everywhere, preset="ais", group=group)
    assert torch.equal(made.advantages, adv[:, None].expand(4, 4))


def test_a_rejected_row_leaves_the_baseline_of_its_group():
    """Rewards 6, 2, 1 less their mean 3; row 0 is garbage; the mean of 2 and 1 is 1.5."""
    nan = math.nan
    made = apply(
        T([3.0, -1.0, -2.0]),
        target=torch.full((3, 2), -1.0),
        behaviour=T([[nan, nan], [-1.0, -1.0], [-1.0, -1.0]]),
        mask=torch.ones(3, 2),
        preset="none",
        group=T([5, 5, 5]),
    )
    assert torch.equal(made.advantages, T([[0.0, 0.0], [0.5, 0.5], [-0.5, -0.5]]))
    assert made.metrics["excluded/garbage_episodes"].sum == 1


def test_without_groups_a_rejected_row_changes_no_other():
    made = apply(
        T([3.0, -1.0, -2.0]),
        target=torch.full((3, 1), -1.0),
        behaviour=T([[math.nan], [-1.0], [-1.0]]),
        mask=torch.ones(3, 1),
        preset="none",
    )
    assert made.advantages.tolist() == [[0.0], [-1.0], [-2.0]]


def test_weights_can_be_normalised():
    log2 = math.log(2)
    made = apply(
        torch.ones(1),
        target=torch.full((1, 2), -2.0),
        behaviour=T([[-2.0 - log2, -2.0 + log2]]),
        mask=torch.ones(1, 2),
        preset="tis",
        normalize=True,
    )
    assert torch.allclose(made.weight, T([[2.0, 0.5]]) / 1.25)


def test_filters_of_other_presets_come_first():
    log2 = math.log(2)
    made = apply(
        torch.ones(1),
        target=torch.full((1, 2), -2.0),
        behaviour=T([[-2.0 - 2 * log2, -2.0 - log2]]),
        mask=torch.ones(1, 2),
        preset="tis",
        filters={"k1-token": {"high": 3.0}},
    )
    assert made.keep.tolist() == [[False, True]]
    assert torch.allclose(made.weight, T([[0.0, 2.0]]))


def test_what_is_left_alone_in_its_group_has_advantage_0_and_stays_in_the_loss():
    made = apply(
        T([1.0, -1.0]),
        target=torch.full((2, 1), -1.0),
        behaviour=T([[math.nan], [-1.0]]),
        mask=torch.ones(2, 1),
        preset="none",
        group=T([3, 3]),
    )
    assert made.unweighted.tolist() == [[0.0], [0.0]]
    assert made.keep.tolist() == [[False], [True]]
    assert made.weight.tolist() == [[0.0], [1.0]]


def test_a_row_without_action_tokens_leaves_the_baseline_of_its_group():
    target, behaviour = batch()
    made = apply(
        T([1.0, 2.0, -6.0, 3.0]),
        target=target,
        behaviour=behaviour,
        mask=MASK,
        preset="none",
        group=T([0] * 4),
    )
    assert made.unweighted.max(1).values.tolist() == [0, 0, 0, 1]  # 1, 2, 3 less 2; tool tokens 0
    assert made.unweighted.min(1).values.tolist() == [-1, 0, 0, 0]


def test_versions_become_lags_and_unknown_versions_no_lag():
    target, behaviour = batch()
    given_all = {"target": target, "behaviour": behaviour, "mask": MASK, "preset": "none"}
    known = apply(torch.zeros(4), **given_all, version=T([3, 4, 0, 5]), trainer_version=5)
    assert known.gap.lag.tolist() == [2, 2, 2, 1, 1, 0, 0, 0]
    assert known.metrics["gap/lag"].max == 2
    unknown = apply(torch.zeros(4), **given_all)
    assert "gap/lag" not in unknown.metrics
    assert not [name for name in unknown.metrics if name.endswith("reward")]
    assert set(unknown.gap.version.tolist()) == {UNKNOWN_VERSION}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"target": torch.zeros(4, 3)}, "target"),
        ({"behaviour": torch.zeros(3, 4)}, "behaviour"),
        ({"mask": torch.ones(4)}, "mask"),
        ({"mask": torch.full((4, 4), 0.5)}, "mask"),
        ({"mask": torch.full((4, 4), 2)}, "mask"),
        ({"target": torch.full((4, 4), -1.0, dtype=torch.bfloat16)}, "logp_target"),
        ({"behaviour": torch.full((4, 4), -1.0, dtype=torch.bfloat16)}, "logp_behaviour"),
        ({"target": torch.full((4, 4), math.nan)}, "logp_target"),
        ({"behaviour": torch.full((4, 4), 0.5)}, "logp_behaviour"),
        ({"version": torch.zeros(4)}, "trainer_version"),
        ({"version": torch.full((4,), 9), "trainer_version": 8}, "lag"),
        ({"group": torch.zeros(3)}, "group"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, field):
    target, behaviour = batch(junk=-1.0)
    sound = {"target": target, "behaviour": behaviour, "mask": MASK, "preset": "tis"}
    with pytest.raises(DataError) as caught:
        apply(torch.zeros(4), **{**sound, **change})
    assert caught.value.field == field


@pytest.mark.parametrize("advantages", [torch.zeros(3), torch.zeros(4, 3), torch.zeros(())])
def test_advantages_of_another_shape_are_refused(advantages):
    target, behaviour = batch()
    with pytest.raises(DataError, match="advantages"):
        apply(advantages, target=target, behaviour=behaviour, mask=MASK, preset="tis")


def test_advantages_that_are_not_finite_are_refused():
    target, behaviour = batch()
    rest = {"target": target, "behaviour": behaviour, "mask": MASK, "preset": "tis"}
    for bad in (T([math.nan, 0.0, 0.0, 0.0]), torch.full((4, 4), math.inf)):
        with pytest.raises(DataError):
            apply(bad, **rest)
    apply(T([0.0, 0.0, math.nan, 0.0]), **rest)  # a row without action tokens may hold anything


def test_an_unknown_preset_is_refused_with_the_nearest():
    target, behaviour = batch()
    with pytest.raises(ConfigError, match="did you mean 'tis'"):
        apply(torch.zeros(4), target=target, behaviour=behaviour, mask=MASK, preset="tsi")


def test_results_carry_no_gradient():
    target, behaviour = batch(junk=-1.0)
    target.requires_grad_()
    made = apply(torch.ones(4), target=target, behaviour=behaviour, mask=MASK, preset="ais")
    assert not made.advantages.requires_grad
