import json
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from trueup.diagnostics.metrics import Metric
from trueup.records.tokens import write_step
from trueup.reports.charts import draw, has_data, legend
from trueup.reports.figure_data import MAX_BARS, stacked
from trueup.reports.figures import figures_of, floor, wilson
from trueup.reports.run import read_run
from trueup.reports.summary import summary_of
from trueup.reports.tokens import measure_steps


def all_figures(path):
    records = read_run(path)
    tokens, _ = measure_steps(path)
    return {f["id"]: f for f in figures_of(records, summary_of(records), tokens)}


def test_wilson_interval_by_hand():
    # p = .5, n = 10, z = 2: centre .5, half width sqrt(.25/10 + 4/400) · 2 / 1.4
    assert wilson(5, 10, z=2.0) == pytest.approx((0.5 - 0.26726, 0.5 + 0.26726), abs=1e-4)
    assert wilson(0, 10)[0] == 0
    assert wilson(10, 10)[1] == 1


def test_every_figure_is_json_and_draws_as_well_formed_svg(simulated):
    found = all_figures(simulated(steps=8))
    assert json.loads(json.dumps(found, allow_nan=False)).keys() == found.keys()
    for figure in found.values():
        assert has_data(figure), figure["id"]
        drawn = ElementTree.fromstring(draw(figure))
        assert drawn.tag.endswith("svg")
        assert "nan" not in draw(figure)
        assert all(item.name for item in legend(figure))


def test_every_figure_of_an_empty_run_says_that_there_is_nothing(writer):
    for figure in all_figures(writer().close()).values():
        assert not has_data(figure)
        assert "nothing recorded" in draw(figure)


def test_reward_counts_groups_without_contrast(writer):
    run = writer()
    for name, group, reward in (("a", 0, 1.0), ("b", 0, 0.0), ("c", 1, 0.0), ("d", 1, 0.0)):
        run.issue(0, name, group=group)
        run.finish(1, name, group=group, spans=[[0, "engine-0", 0, 1]], reward=reward)
    run.add(1, "claim", group=0, version=0, step=0, episodes=["a", "b"])
    run.add(1, "drop", group=1, version=0, reason="zero_variance", episodes=["c", "d"])
    run.add(2, "train", version=0, step=0, t0=1.0, t1=2.0, phases={})
    run.add(2, "commit", version=1, step=0, episodes=["a", "b"])
    train = all_figures(run.close())["reward"]["series"][0]
    assert train["y"] == [0.25]
    assert train["high"] == [0.5]  # group means .5 and 0: standard error .25


def test_gap_parts_floor_and_weights_come_from_the_tokens(writer, row):
    run = writer()
    fine = {"step_version": 2, "engine": 0.01}
    rows = [
        row("a", staleness=0.1, version=1, weight=1.5, **fine),
        row("b", staleness=0.0, version=2, weight=1.0, keep=False, **fine),
        row("c", staleness=9.0, version=0, trained=False),
    ]
    write_step(run.directory, 3, rows)
    (step,), notes = measure_steps(run.close())
    assert notes == []
    assert (step.step, step.tokens, step.attributed) == (3, 8, 8)
    assert step.staleness_part == pytest.approx(0.05, rel=1e-4)
    assert step.engine_part == pytest.approx(0.01, rel=1e-4)
    assert floor([step]) == step.engine_part
    assert step.lag_in_flight == 0.5
    assert step.lag_in_queue == 0
    assert step.weights == {30: 4, 0: 4}  # bins of .05; what is not kept weighs 0


def test_staleness_shows_the_bound_even_if_no_token_reaches_it(writer):
    run = writer("demo", "schedule.staleness=3")
    figure = all_figures(run.close())["staleness"]
    assert figure["rules"] == [{"value": 3.5, "label": "bound 3"}]
    assert figure["edges"] == [-0.5, 0.5, 1.5, 2.5, 3.5, 4.5]


def test_timeline_lanes_hold_disjoint_attempts_within_the_window(simulated):
    figure = all_figures(simulated(steps=9, slots=12))["timeline"]
    kinds = [lane["kind"] for lane in figure["lanes"]]
    assert kinds == ["slot"] * 12 + ["decode", "sync", "train"]
    end = max(b["t1"] for b in figure["blocks"])
    for lane in range(12):
        bars = sorted((b["t0"], b["t1"]) for b in figure["blocks"] if b["lane"] == lane)
        assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(bars))
        assert all(0 <= start <= stop <= end for start, stop in bars)
    trained = [b["label"] for b in figure["blocks"] if b["lane"] == 14]
    assert trained == [f"step {s}" for s in range(2, 7)]
    assert len(figure["bands"]) >= 4


def test_an_unreadable_table_is_named_and_the_others_are_read(simulated):
    path = simulated(steps=4)
    (path / "episodes" / "step-000002.parquet").write_bytes(b"PAR1 torn")
    tokens, notes = measure_steps(path)
    assert [t.step for t in tokens] == [0, 1, 3]
    assert len(notes) == 1
    assert "step-000002" in notes[0]


def test_effective_size_is_missing_where_a_step_had_no_loss(writer):
    run = writer()
    for step in (0, 1):
        run.issue(step, f"e{step}")
        run.finish(step, f"e{step}", spans=[[step, "engine-0", 0, 1]], reward=1.0)
        run.add(step, "claim", group=step, version=0, step=step, episodes=[f"e{step}"])
        run.add(step + 1, "train", version=0, step=step, t0=step, t1=step + 1, phases={})
    run.add(2, "commit", version=1, step=1, episodes=["e1"])
    for step, value in ((0, 0.0), (1, 0.9)):
        run.ledger.record_metrics(step, {"ess/applied_tokens": Metric.of(value)})
    (applied,) = all_figures(run.close())["ess"]["series"]
    assert applied["y"] == [None, 0.9]


def test_a_metric_that_is_no_number_is_a_hole(writer):
    run = writer()
    broken = Metric(sum=float("nan"), count=1, min=0, max=0)
    run.ledger.record_metrics(0, {"gap/abs_log_ratio": Metric.of(0.5)})
    run.ledger.record_metrics(1, {"gap/abs_log_ratio": broken})
    assert read_run(run.close()).series("gap/abs_log_ratio") == ([0.0, 1.0], [0.5, None])


def test_bars_of_a_long_run_are_means_over_several_steps():
    axis = {"label": "", "scale": "linear"}
    short = stacked("a", "", "", axis, [3, 5], {"x": [1.0, 2.0], "y": [0.0, 0.0]})
    assert short["edges"] == [2.5, 3.5, 4.5, 5.5]
    assert short["series"] == [{"name": "x", "values": [1.0, 0.0, 2.0]}]
    steps = list(range(2 * MAX_BARS))
    long = stacked("a", "", "", axis, steps, {"x": [float(s) for s in steps]})
    assert long["edges"][:3] == [-0.5, 1.5, 3.5]
    assert len(long["series"][0]["values"]) == MAX_BARS
    assert long["series"][0]["values"][:2] == [0.5, 2.5]
