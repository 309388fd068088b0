import math
import random
from statistics import fmean

import pytest
import torch

from trueup.diagnostics.probe import (
    RESOLUTION,
    Reading,
    floor_of,
    growth,
    limit_of,
    reading,
)
from trueup.diagnostics.trend import FALSE_ALARM, t_quantile, trend


def of(*sequences: float) -> Reading:
    """A reading whose sequences have these means, two tokens each."""
    return Reading(
        tokens=2 * len(sequences),
        mean=fmean(sequences),
        p99=max(sequences),
        min=min(sequences),
        max=max(sequences),
        sequences=sequences,
    )


def test_a_reading_is_of_tokens_and_of_sequences():
    """|d| = .1 .3 | .2: the mean of tokens is .2, of sequences .2 and .2."""
    found = reading(
        torch.tensor([-1.0, -2.0, -3.0]),
        torch.tensor([-1.1, -1.7, -3.2]),
        torch.tensor([4, 4, 9]),
    )
    assert found.tokens == 3
    assert found.mean == pytest.approx(0.2)
    assert (found.min, found.max) == (pytest.approx(0.1), pytest.approx(0.3))
    assert found.p99 == pytest.approx(0.298)
    assert found.sequences == (pytest.approx(0.2), pytest.approx(0.2))


def test_the_floor_pools_loads_by_median_and_variance_within():
    """Variances .02, .02, .02 with one degree of freedom each; means .2, .4, .9."""
    floor = floor_of([of(0.1, 0.3), of(0.3, 0.5), of(0.8, 1.0)])
    assert floor is not None
    assert floor.level == pytest.approx(0.4)
    assert floor.variance == pytest.approx(0.02)
    assert (floor.sequences, floor.freedom) == (6, 3)
    error = math.sqrt(0.02 * (1 / 2 + 1 / 6))
    assert floor.limit(2) == pytest.approx(0.4 + 22.205 * error)


def test_a_floor_that_does_not_scatter_still_leaves_a_margin():
    floor, fine = floor_of([of(0.2, 0.2)]), floor_of([of(1e-7, 1e-7)])
    assert floor is not None
    assert fine is not None
    assert floor.limit(2) == pytest.approx(0.3)
    assert fine.limit(2) == pytest.approx(RESOLUTION, rel=0.01)


def test_the_first_load_is_held_against_its_precision_alone():
    assert limit_of(of(0.2, 0.3), None, 0.1) == 0.1
    assert limit_of(of(0.2, 0.3), None, None) == math.inf
    assert limit_of(of(0.2, 0.3), floor_of([of(0.2, 0.2)]), 0.1) == 0.1
    assert limit_of(of(0.2, 0.3), floor_of([of(0.02, 0.02)]), 0.1) == pytest.approx(0.03)
    assert floor_of([]) is None


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 8, 12, 30, 100])
def test_the_quantile_leaves_its_chance_to_a_sound_load(freedom: int):
    """The upper tail of Student's density, by its integral over x = t / u."""
    t, steps = t_quantile(freedom), 20_000
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    scale /= math.sqrt(freedom * math.pi)
    total = 0.0
    for i in range(steps):
        u = (i + 0.5) / steps
        total += (1 + (t / u) ** 2 / freedom) ** (-(freedom + 1) / 2) * t / u**2 / steps
    assert scale * total == pytest.approx(FALSE_ALARM, rel=0.01)
    assert t_quantile(freedom + 1) <= t


def test_sound_loads_raise_no_alarm():
    """6,000 loads of six sequences with |d| of a half-normal scale, 12 tokens each, dependent
    within a sequence: by the margin alone an alarm would need a mean 5 standard errors off, so at a
    chance of 1e-4 each at the very most, all of them together would give .6; more than 8 have a
    chance below 1e-7."""
    rng = random.Random(1)
    alarms = 0
    for _ in range(300):
        sound: list[Reading] = []
        for _ in range(20):
            level = [rng.uniform(0.7, 1.3) for _ in range(6)]  # what a sequence's tokens share
            sizes = [fmean(x * abs(rng.gauss(0, 0.05)) for _ in range(12)) for x in level]
            found = of(*sizes)
            alarm = found.mean > limit_of(found, floor_of(sound[-5:]), None)
            alarms += alarm
            if not alarm:
                sound.append(found)
    assert alarms <= 8


def test_a_stale_head_is_an_alarm_at_the_second_load():
    """Measured in an engine: .044 when fresh, .26 after its first update."""
    fresh = [0.03, 0.05, 0.04, 0.045, 0.05, 0.049]
    stale = of(*[6 * x for x in fresh])
    assert stale.mean > limit_of(stale, floor_of([of(*fresh)]), None)


def test_a_trend_is_a_line_with_its_error():
    """1 3 2 4: slope .8, residuals -.3 .9 -.9 .3, so s² = 1.8/2 and the error √(.9/5)."""
    assert trend([1.0, 3.0, 2.0, 4.0]) == (pytest.approx(0.8), pytest.approx(math.sqrt(0.18)))


def test_what_grows_at_learning_rate_0_is_an_alarm():
    assert growth([of(0.1 + 0.01 * i, 0.1 + 0.01 * i) for i in range(6)]) > 1
    assert growth([of(0.1, 0.1)] * 9) == 0
    assert growth([of(x, x) for x in (0.2, 0.1, 0.05, 0.04, 0.03)]) == 0
    assert growth([of(x, x) for x in (0.1, 0.2, 0.3, 0.4)]) == 0
    jumps = growth([of(x, x) for x in (0.1, 0.12, 0.09, 0.11, 0.13, 0.1, 0.12)])
    assert 0 < jumps < 1
