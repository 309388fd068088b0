import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.gaps import make_gap
from trueup.diagnostics.attribution import attribution, repeat_variance

NAN = math.nan


def test_parts_worked_out_by_hand():
    # staleness .2, −.2 | .4; engine .1, .1 | −.1; d .3, −.1 | .3. Two tokens are not scored.
    found = attribution(
        make_gap(
            [[-1.0, -2.0, -1.0], [-1.0, -1.0]],
            [[-1.3, -1.9, -1.0], [-1.3, NAN]],
            version_logps=[[-1.2, -1.8, NAN], [-1.4, -1.0]],
        )
    )
    assert (found.tokens, found.scored) == (4, 3)
    assert found.total.mean == pytest.approx(0.5 / 3, abs=1e-6)
    assert found.staleness.mean == pytest.approx(0.4 / 3, abs=1e-6)
    assert found.engine.mean == pytest.approx(0.1 / 3, abs=1e-6)
    assert found.staleness.abs_mean == pytest.approx(0.8 / 3, abs=1e-6)
    assert found.floor == found.engine.abs_mean == pytest.approx(0.1, abs=1e-6)
    # Σd² = .19; Σ staleness·d = .06 + .02 + .12 = .2; Σ engine·d = .03 − .01 − .03 = −.01.
    assert found.staleness.share == pytest.approx(0.2 / 0.19, abs=1e-5)
    assert found.engine.share == pytest.approx(-0.01 / 0.19, abs=1e-5)
    assert found.total.share == pytest.approx(1.0)
    # E[s²] − E[s]² = .08 − .017778; E[e²] − E[e]² = .01 − .001111; E[se] = −.04/3 − .004444
    assert found.variance_staleness == pytest.approx(0.0622222, abs=1e-6)
    assert found.variance_engine == pytest.approx(0.0088889, abs=1e-6)
    assert found.covariance == pytest.approx(-0.0177778, abs=1e-6)


def test_nothing_scored_gives_zeros():
    for gap in (
        make_gap([[-1.0]], [[-1.5]]),
        make_gap([[-1.0]], [[-1.5]], version_logps=[[NAN]]),
    ):
        found = attribution(gap)
        assert (found.tokens, found.scored) == (1, 0)
        assert found.total.mean == found.staleness.share == found.floor == 0


def test_no_gap_has_no_shares():
    found = attribution(
        make_gap([[-1.0], [-2.0]], [[-1.0], [-2.0]], version_logps=[[-1.0], [-2.0]])
    )
    assert found.total.share == found.engine.share == 0


def test_one_episode_has_an_interval_of_no_width():
    part = attribution(
        make_gap([[-1.0, -2.0]], [[-1.5, -2.1]], version_logps=[[-1.2, -2.0]])
    ).engine
    assert part.mean_interval == pytest.approx((part.mean, part.mean))


def _drawn(seed, episodes=40):
    """Staleness ~ N(.1, .2²) + an episode's own N(0, .2²); engine ~ N(0, .1²)."""
    gen = torch.Generator().manual_seed(seed)
    target = -1 - torch.rand(episodes, 5, generator=gen)
    own = 0.2 * torch.randn(episodes, 1, generator=gen)
    version = target - 0.1 - own - 0.2 * torch.randn(episodes, 5, generator=gen)
    behaviour = version - 0.1 * torch.randn(episodes, 5, generator=gen)
    return make_gap(
        target.tolist(), behaviour.clamp(max=0).tolist(), version_logps=version.tolist()
    )


def test_the_interval_over_episodes_covers_the_true_mean():
    # The seeds are fixed. Coverage over 400 seeds is .94, so under new ones 50 or fewer of 60 has
    # probability .003; resampling tokens instead of episodes covers .74, 48 of these 60.
    covered = 0
    for seed in range(60):
        low, high = attribution(_drawn(seed), resamples=300).staleness.mean_interval
        covered += low <= 0.1 <= high
    assert covered > 50


def test_more_episodes_than_are_drawn_at_a_time_have_an_interval_too():
    low, high = attribution(_drawn(0, episodes=5000)).staleness.mean_interval
    # ± 1.96·√((.2² + .2²/5)/5000) = .00607; a percentile of 1000 resamples is known to about 5 %.
    assert (high - low) / 2 == pytest.approx(0.00607, rel=0.15)


def test_intervals_depend_on_nothing_but_the_seed():
    gap = _drawn(0)
    assert attribution(gap, seed=3) == attribution(gap, seed=3)
    assert attribution(gap, seed=3) != attribution(gap, seed=4)


def test_the_noise_of_a_score_is_half_the_squared_difference_of_two():
    first, second = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.2, -2.4, NAN])
    assert float(repeat_variance(first, second)) == pytest.approx(0.05, abs=1e-6)
    assert float(repeat_variance(first, torch.full((3,), NAN))) == 0


def test_the_scorers_noise_is_taken_out_of_the_second_moments():
    """10,000 tokens: each true moment is met within .05 of it (20 standard errors)."""
    gen = torch.Generator().manual_seed(0)

    def normal(scale):
        return scale * torch.randn(100, 100, generator=gen)

    sigma = 0.05
    mu = -2 - torch.rand(100, 100, generator=gen)
    true_version = mu + normal(0.04)
    true_target = true_version + normal(0.03)
    target, version = true_target + normal(sigma), true_version + normal(sigma)
    version[:50] = target[:50] = true_version[:50] + normal(sigma)[:50]  # of the current version
    found = attribution(
        make_gap(target.tolist(), mu.tolist(), version_logps=version.tolist()),
        scorer_variance=sigma**2,
        resamples=10,
    )
    assert found.scorer_noise == pytest.approx(sigma)
    assert found.total.noise == pytest.approx(sigma**2)
    assert found.staleness.noise == pytest.approx(sigma**2)  # 2σ² on half of the tokens
    assert found.engine.noise == pytest.approx(sigma**2)
    left = {
        name: getattr(found, name).second_moment - getattr(found, name).noise
        for name in ("total", "staleness", "engine")
    }
    # E[staleness²] = .03²/2; E[engine²] = .04²; independent.
    assert left["staleness"] == pytest.approx(0.00045, rel=0.25)
    assert left["engine"] == pytest.approx(0.0016, rel=0.1)
    assert left["total"] == pytest.approx(0.00205, rel=0.1)
    assert found.staleness.share_above_noise == pytest.approx(0.45 / 2.05, abs=0.04)
    assert found.engine.share_above_noise == pytest.approx(1.6 / 2.05, abs=0.04)
    assert found.staleness.share_above_noise + found.engine.share_above_noise == pytest.approx(1)
    assert found.staleness.share > 0.3  # what one would print without


def test_a_gap_of_nothing_but_noise_has_no_share_above_it():
    found = attribution(
        make_gap([[-1.0, -2.0]], [[-1.01, -2.0]], version_logps=[[-1.0, -2.0]]),
        scorer_variance=1.0,
    )
    assert found.engine.share == pytest.approx(1.0)
    assert found.engine.share_above_noise == found.total.share_above_noise == 0


logp = st.floats(-20, -0.0625, width=32)


@given(st.lists(st.tuples(logp, logp, logp), min_size=1, max_size=20))
def test_parts_sum_to_the_total_exactly_and_shares_to_one(triples):
    target, version, behaviour = map(list, zip(*triples, strict=True))
    found = attribution(make_gap([target], [behaviour], version_logps=[version]), resamples=10)
    assert found.staleness.mean + found.engine.mean == pytest.approx(found.total.mean, abs=1e-13)
    if found.total.abs_mean > 1e-6:
        assert found.staleness.share + found.engine.share == pytest.approx(1.0, abs=1e-9)


def test_a_kept_cache_is_a_part_of_its_own():
    # Target −1, π_v −1.5, π_v^cache −2, behaviour −2.25, and one token without any of it.
    gap = replace(
        make_gap([[-1.0, -1.0]], [[-2.25, -1.0]]),
        logp_version=torch.tensor([-1.5, -1.0]),
        logp_cache=torch.tensor([-2.0, -1.0]),
    )
    found = attribution(gap, scorer_variance=0.01)
    means = (found.total.mean, found.staleness.mean, found.cache.mean, found.engine.mean)
    assert means == pytest.approx((0.625, 0.25, 0.25, 0.125))
    # E[d_i·d] / E[d²] with d = 1.25 on one of the two tokens.
    shares = (found.staleness.share, found.cache.share, found.engine.share)
    assert shares == pytest.approx((0.4, 0.4, 0.2))
    # Half of the tokens have three scores of their own, the other half one.
    noise = (found.staleness.noise, found.cache.noise, found.engine.noise)
    assert noise == pytest.approx((0.01, 0.01, 0.01))
