import math

import pytest
import torch

from support.gaps import make_gap
from trueup.diagnostics.support import check_comparable, support
from trueup.errors import DataError


def test_raw_log_probs_at_a_temperature_are_refused():
    with pytest.raises(DataError, match="raw log-probs at T"):
        check_comparable(temperature=0.6, raw=True)
    check_comparable(temperature=1.0, raw=True)
    check_comparable(temperature=0.6, raw=False)


def test_on_an_unchanged_policy_truncated_support_explains_the_gap_exactly():
    # π = .5 .3 .15 .05; top-p .9 keeps three of mass .95: μ = π / .95.
    pi = [0.5, 0.3, 0.15]
    target = [math.log(p) for p in pi]
    gap = make_gap([target, target], [[math.log(p / 0.95) for p in pi]] * 2)
    found = support(gap, torch.full((6,), math.log(0.95)))
    assert found.mass == pytest.approx(0.95)
    assert float(gap.log_ratio.mean()) == pytest.approx(found.log_mass, abs=1e-6)
    assert found.rest == pytest.approx(0, abs=1e-6)
    assert found.rest_abs == pytest.approx(0, abs=1e-6)


def test_what_truncation_does_not_explain_is_left():
    gap = make_gap([[-1.0], [-1.0]], [[-1.2], [-0.7]])  # d = .2, −.3
    found = support(gap, torch.tensor([-0.1, 0.0]))  # rest .3, −.3
    assert found.rest == pytest.approx(0, abs=1e-6)
    assert found.rest_abs == pytest.approx(0.3)


@pytest.mark.parametrize("bad", [[0.1, 0.0], [math.nan, 0.0], [-math.inf, 0.0], [0.0]])
def test_a_kept_mass_outside_its_range_is_refused(bad):
    gap = make_gap([[-1.0], [-1.0]], [[-1.2], [-0.7]])
    with pytest.raises(DataError, match="log_mass"):
        support(gap, torch.tensor(bad))
