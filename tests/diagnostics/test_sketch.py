import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trueup.diagnostics.sketch import EXACT, RELATIVE_ERROR, QuantileSketch
from trueup.errors import DataError

SHARES = (0.0, 0.01, 0.5, 0.95, 0.99, 1.0)
numbers = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=30)


def normal(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def same(left, right):
    return left.to_bytes() == right.to_bytes()


@given(numbers, st.floats(0, 1))
def test_a_few_values_have_exact_quantiles(values, share):
    expected = np.quantile(np.array(values, dtype=np.float64), share)
    found = QuantileSketch.of(torch.tensor(values)).quantile(share)
    assert found == pytest.approx(float(expected), abs=1e-9 * max(map(abs, values)))


def test_the_quantile_at_the_largest_exact_size_is_a_value_itself():
    x = normal(EXACT)
    assert QuantileSketch.of(x).quantile(1 / (EXACT - 1)) == pytest.approx(
        float(x.sort().values[1]), rel=1e-9
    )


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e20])
def test_many_values_have_quantiles_within_the_stated_error(scale):
    x = normal(EXACT + 1) * scale
    sketch = QuantileSketch.of(x)
    assert sketch.values is None
    for share in SHARES:
        expected = float(np.quantile(x.double().numpy(), share))
        # At a share of 1/2 the value itself is about 0: the error is relative to it.
        assert sketch.quantile(share) == pytest.approx(
            expected, rel=RELATIVE_ERROR * 1.001, abs=1e-3 * scale if share == 0.5 else 0
        )
    assert (sketch.quantile(0.0), sketch.quantile(1.0)) == (sketch.min, sketch.max)


def test_two_shards_merge_to_the_whole_at_every_size():
    for count in (10, EXACT, EXACT + 1, 3 * EXACT):
        x = normal(count)
        whole = QuantileSketch.of(x)
        for cut in (0, 3, count // 2):
            left, right = QuantileSketch.of(x[:cut]), QuantileSketch.of(x[cut:])
            assert same(left.merge(right), whole)
            assert same(right.merge(left), whole)


def test_the_order_of_many_shards_does_not_matter():
    shards = [QuantileSketch.of(normal(40_000, seed)) for seed in range(5)]
    results = set()
    for seed in range(4):
        random.Random(seed).shuffle(shards)
        whole = QuantileSketch.of(torch.zeros(0))
        for shard in shards:
            whole = whole.merge(shard)
        results.add(whole.to_bytes())
    assert len(results) == 1


@pytest.mark.parametrize("count", [0, 1, 1000, EXACT + 1])
def test_bytes_hold_everything(count):
    sketch = QuantileSketch.of(normal(count))
    again = QuantileSketch.from_bytes(sketch.to_bytes())
    assert same(again, sketch)
    assert (again.count, again.min, again.max) == (sketch.count, sketch.min, sketch.max)
    if count:
        assert again.quantile(0.9) == sketch.quantile(0.9)


def test_bytes_stay_small_however_many_values():
    assert len(QuantileSketch.of(normal(1_000_000)).to_bytes()) < 60_000


@pytest.mark.parametrize("data", [b"", b"\x07" + bytes(24), b"\x01" + bytes(8) * 3 + b"\0\0\0\0"])
def test_foreign_bytes_are_refused(data):
    with pytest.raises(DataError, match="sketch must be the bytes of a sketch"):
        QuantileSketch.from_bytes(data)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
def test_what_is_not_finite_in_float32_is_refused(value):
    with pytest.raises(DataError, match="values must be finite"):
        QuantileSketch.of(torch.tensor([0.0, value], dtype=torch.float64))


def test_nothing_has_no_quantile():
    assert math.isnan(QuantileSketch.of(torch.zeros(0)).quantile(0.5))


def test_zeros_signs_and_extremes_share_no_bucket():
    x = torch.tensor([-3e38, -1.0, -1e-13, 0.0, 1e-13, 1e-11, 1.0, 3e38]).repeat(EXACT)
    sketch = QuantileSketch.of(x)
    found = [sketch.quantile((i + 0.5) / 8) for i in range(8)]
    assert found == pytest.approx([-3e38, -1, 0, 0, 0, 1e-11, 1, 3e38], rel=0.006)
