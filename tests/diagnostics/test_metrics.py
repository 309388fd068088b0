import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trueup.diagnostics.metrics import METRICS, Metric, as_markdown, metric_of, metrics_of

values = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20)


def test_a_metric_holds_sum_count_and_extremes_of_the_selected_values():
    x = torch.tensor([1.0, math.nan, -3.0, 5.0])
    found = metric_of(x, torch.tensor([True, False, True, True]))
    assert found == Metric(sum=3, count=3, min=-3, max=5)
    assert found.mean == 1


def test_selecting_nothing_gives_the_neutral_element():
    nothing = metric_of(torch.tensor([7.0]), torch.tensor([False]))
    assert math.isnan(nothing.mean)
    assert nothing.merge(Metric.of(2.0)) == Metric.of(2.0)
    assert metric_of(torch.zeros(0)) == nothing


def test_many_metrics_come_together_and_empty_ones_are_left_out():
    found = metrics_of(
        {
            "a": torch.tensor([True, False]),
            "b": (torch.tensor([1, 2]), torch.tensor([False, False])),
            "c": torch.tensor(3),
        }
    )
    assert found == {"a": Metric(sum=1, count=2, min=0, max=1), "c": Metric.of(3)}
    assert metrics_of({}) == {}


@given(left=values, right=values)
def test_merging_equals_measuring_together(left, right):
    merged = metric_of(torch.tensor(left)).merge(metric_of(torch.tensor(right)))
    whole = metric_of(torch.tensor(left + right))
    assert (merged.count, merged.min, merged.max) == (whole.count, whole.min, whole.max)
    assert merged.sum == pytest.approx(whole.sum, rel=1e-12, abs=1e-6)


def test_weighted_values_have_weighted_sums_and_merge():
    x, w = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([2.0, 3.0, 5.0])
    found = metrics_of({"a": (x, None, w), "b": (x, torch.tensor([True, True, False]), w)})
    assert found["a"] == Metric(sum=7, count=10, min=0, max=1)
    assert found["b"] == Metric(sum=2, count=5, min=0, max=1)


PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_of_metrics_is_up_to_date():
    fresh = "python -m trueup.diagnostics.metrics > docs/metrics.md"
    assert PAGE.read_text(encoding="utf-8") == as_markdown(), f"run: {fresh}"


def test_the_table_is_documented_line_by_line():
    lines = as_markdown().splitlines()
    for name, spec in METRICS.items():
        assert name == spec.name
        assert name.count("/") == 1
        assert f"| `{name}` | {spec.unit} | {spec.reducer} | {spec.meaning} |" in lines
