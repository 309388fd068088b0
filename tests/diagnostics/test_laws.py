"""What holds for every diagnostic: finite for finite input, blind to the order of episodes."""

import dataclasses
import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.gaps import make_gap
from trueup.diagnostics.attribution import attribution
from trueup.diagnostics.calibration import calibration
from trueup.diagnostics.effective_size import effective_size
from trueup.diagnostics.labels import label_test
from trueup.diagnostics.metrics import METRICS, Metric, metrics_of
from trueup.diagnostics.mismatch import mismatch, mismatch_values
from trueup.diagnostics.retention import retention, retention_values

logp = st.one_of(st.floats(-200, 0, width=32), st.just(math.nan))
token = st.tuples(st.floats(-200, 0, width=32), logp, logp, logp, st.integers(0, 3), st.booleans())
episodes = st.lists(
    st.tuples(st.lists(token, max_size=4), st.floats(-4, 4, width=32)), min_size=1, max_size=6
)


def built(rows):
    """A gap, log π_{v−1}, advantages, weights and keep flags of drawn episodes."""
    columns = [[[t[i] for t in tokens] for tokens, _ in rows] for i in range(6)]
    gap = make_gap(
        columns[0],
        columns[1],
        rewards=[reward for _, reward in rows],
        lags=columns[4],
        version_logps=columns[2],
    )
    before = torch.tensor([x for row in columns[3] for x in row], dtype=torch.float32)
    advantage = gap.reward[gap.episode]
    keep = torch.tensor([x for row in columns[5] for x in row], dtype=torch.bool) & gap.valid
    weight = torch.where(keep, gap.log_ratio.clamp(-20, 20).exp(), 0.0)
    return gap, before, advantage, weight, keep


DIAGNOSTICS = {
    "mismatch": lambda gap, b, a, w, k: mismatch(gap, advantage=a),
    "attribution": lambda gap, b, a, w, k: attribution(
        gap, advantage=a, scorer_variance=0.1, resamples=1
    ),
    "labels": lambda gap, b, a, w, k: label_test(gap, logp_before=b),
    "calibration": lambda gap, b, a, w, k: calibration(gap),
    "effective size": lambda gap, b, a, w, k: effective_size(gap, weight=w, keep=k),
    "retention": lambda gap, b, a, w, k: retention(gap, keep=k, advantage=a, weight=w),
    "metrics": lambda gap, b, a, w, k: metrics_of(
        dict(mismatch_values(gap))
        | dict(retention_values(gap, keep=k, among=gap.valid, advantage=a, weight=w))
    ),
}


def numbers(value, path=""):
    """Every number of a nested result by its path; intervals depend on the order of resamples."""
    if isinstance(value, float | int):
        return {path: float(value)}
    if isinstance(value, str) or value is None:
        return {}
    if dataclasses.is_dataclass(value):
        items = [
            (f.name, getattr(value, f.name))
            for f in dataclasses.fields(value)
            if not f.name.endswith("interval")
        ]
    elif isinstance(value, Mapping):
        items = list(value.items())
    else:
        items = list(enumerate(value))
    return {k: v for name, x in items for k, v in numbers(x, f"{path}/{name}").items()}


@pytest.mark.parametrize("name", DIAGNOSTICS)
@settings(max_examples=30)
@given(episodes)
def test_finite_input_gives_finite_figures(name, rows):
    found = numbers(DIAGNOSTICS[name](*built(rows)))
    assert found
    assert [path for path, value in found.items() if not math.isfinite(value)] == []


@pytest.mark.parametrize("name", DIAGNOSTICS)
@settings(max_examples=30)
@given(episodes)
def test_the_order_of_episodes_does_not_matter(name, rows):
    one, other = (numbers(DIAGNOSTICS[name](*built(r))) for r in (rows, rows[::-1]))
    assert one.keys() == other.keys()
    for path, value in one.items():
        assert other[path] == pytest.approx(value, rel=1e-6, abs=1e-6), path


@settings(max_examples=30)
@given(episodes)
def test_what_is_recorded_is_in_the_table(rows):
    found = DIAGNOSTICS["metrics"](*built(rows))
    assert found.keys() <= METRICS.keys()
    assert all(isinstance(metric, Metric) for metric in found.values())
