import math
from dataclasses import replace

import pytest
import torch

from support.gaps import make_gap, ratio_gap
from trueup.corrections.compose import correct
from trueup.diagnostics.health import FLOORS, Limits, ceiling, health, stationary
from trueup.diagnostics.metrics import METRICS, Metric

NAN = math.nan


def failed(gap, preset="tis", **kwargs):
    metrics = correct(gap, preset=preset).metrics
    return {v.name for v in health(metrics, corrects=preset != "none", **kwargs) if not v.ok}


def test_a_healthy_batch_passes_everything():
    gap = make_gap([[-1.0, -2.0], [-1.5, -0.5]], [[-1.02, -1.97], [-1.49, -0.51]])
    assert failed(gap, n_changed=5) == set()


@pytest.mark.parametrize(
    ("gap", "kwargs", "name"),
    [
        (ratio_gap([[3.0], [3.0]]), {"preset": "mis"}, "something_kept"),
        (ratio_gap([[0.69] + [-9.0] * 9, [-9.0]]), {}, "effective_size"),
        (make_gap([[-1.2], [-2.2]], [[-1.0], [-2.0]]), {}, "kl"),
        (ratio_gap([[0.01], [0.01]]), {}, "calibration"),
        (make_gap([[-1.0], [-2.0]], [[0.0], [0.0]]), {}, "behaviour_varies"),
        (make_gap([[-1.0], [-2.0]], [[-3.0], [-3.0]]), {}, "behaviour_varies"),
        (make_gap([[-1.0, -1.0], [-2.0]], [[-1.0, NAN], [-2.0]]), {}, "missing_logp"),
        (make_gap([[-1.0], [-2.0]], [[-1.0], [-2.0]]), {"n_changed": 0}, "update_visible"),
    ],
)
def test_each_fault_fails_its_verdict(gap, kwargs, name):
    assert name in failed(gap, **kwargs)


def test_every_verdict_states_value_rule_and_reason():
    metrics = correct(make_gap([[-1.0], [-2.0]], [[0.0], [0.0]]), preset="tis").metrics
    verdicts = {v.name: v for v in health(metrics, corrects=True)}
    assert "all 0 (probability 1)" in verdicts["behaviour_varies"].message
    assert verdicts["kl"].value == pytest.approx(1.5)
    assert verdicts["kl"].rule == "|k1| <= 0.1 nats"
    assert all(v.message and v.rule for v in verdicts.values())


def test_weights_of_which_only_the_largest_is_one_are_active():
    assert "correction_active" not in failed(ratio_gap([[0.0, -0.7], [0.0]]))


def test_a_batch_of_groups_without_contrast_rejects_nothing():
    gap = ratio_gap([[0.1], [0.2]], rewards=[1, 1])
    assert failed(gap) == set()


HEALTHY = correct(
    make_gap([[-1.0, -2.0], [-1.5, -0.5]], [[-1.02, -1.97], [-1.49, -0.51]]), preset="tis"
).metrics


def verdicts(more=(), **kwargs):
    return {v.name: v for v in health({**HEALTHY, **dict(more)}, corrects=True, **kwargs)}


def of(mean, count=1.0):
    return Metric(sum=mean * count, count=count, min=0, max=1)


@pytest.mark.parametrize(
    ("more", "kwargs", "name", "value", "rule"),
    [
        ({"gap/abs_engine": of(0.2)}, {"precision": "bfloat16"}, "floor", 0.2, "0.1 nats"),
        ({"load/digest_differs": Metric.of(1.0)}, {}, "digest", 1.0, "0 of"),
        ({"probe/excess": Metric.of(1.5)}, {}, "probe", 1.5, "<= 1"),
        ({"probe/growth": Metric.of(1.5)}, {}, "probe_growth", 1.5, "<= 1"),
        ({"probe/unknown": Metric.of(0.5)}, {}, "probe_known", 0.5, "0 of"),
        (
            {"grid/slope": of(0.02), "grid/se": of(0.03), "grid/size": of(0.2)},
            {},
            "grid",
            0.02,
            "slope of 0.5",
        ),
        ({"weight/over_cap": of(0.06)}, {}, "over_cap", 0.06, "0.05"),
        ({"excluded/missing_version": of(0.001)}, {}, "missing_version", 0.001, "0 of"),
        ({"label/slope": of(1.0), "label/se": of(0.08)}, {}, "labels", 1.0, "of 0.08"),
        (
            {"kept/shortest_quarter": of(0.9, 100), "kept/longest_quarter": of(0.5, 100)},
            {},
            "length_bias",
            0.5 / 0.9,
            "0.8",
        ),
    ],
)
def test_each_further_verdict_gives_number_rule_and_reason(more, kwargs, name, value, rule):
    found = verdicts(more, **kwargs)[name]
    assert not found.ok
    assert found.value == pytest.approx(value)
    assert rule in found.rule
    assert found.message


@pytest.mark.parametrize(
    ("more", "kwargs", "name"),
    [
        ({"gap/abs_engine": of(0.03)}, {"precision": "bfloat16"}, "floor"),
        ({"weight/over_cap": of(0.05)}, {}, "over_cap"),
        ({"label/slope": of(0.3), "label/se": of(0.08)}, {}, "labels"),
        ({"label/slope": of(1.0), "label/se": of(0.3)}, {}, "labels"),  # undecided
        ({"label/slope": of(0.19), "label/se": of(0.001)}, {}, "labels"),  # within tolerance
        # .9 and .5 of four episodes each say nothing.
        (
            {"kept/shortest_quarter": of(0.9, 4), "kept/longest_quarter": of(0.5, 4)},
            {},
            "length_bias",
        ),
        (
            {"kept/shortest_quarter": of(1.0, 10), "kept/longest_quarter": of(1.0, 10)},
            {},
            "length_bias",
        ),
    ],
)
def test_what_is_within_its_limits_passes(more, kwargs, name):
    assert verdicts(more, **kwargs)[name].ok


def test_what_was_not_recorded_is_not_judged():
    assert not {"floor", "labels", "update_visible"} & set(verdicts())
    assert "floor" not in verdicts({"gap/abs_engine": of(9.0)})
    assert health({}, corrects=True) == ()


def test_limits_can_be_moved():
    assert not verdicts(limits=Limits(ess=1.0))["effective_size"].ok


def test_floors_ascend_with_the_coarseness_of_the_precision():
    assert FLOORS["float32"] < FLOORS["bfloat16"] < FLOORS["fp8"]
    assert ceiling("float32+bfloat16+int8") == FLOORS["int8"]
    assert ceiling("tf32") is None


def series(*means):
    return [of(mean, 100) for mean in means]


def test_a_mismatch_that_grows_while_nothing_is_learned_is_a_stale_cache():
    found = stationary(series(0.01, 0.02, 0.03, 0.04, 0.05))
    assert not found.ok
    assert found.value == pytest.approx(0.04)
    assert "stale cache or sync" in found.message


@pytest.mark.parametrize(
    "means",
    [
        (),
        (0.01,),
        (0.01, 0.05, 0.09, 0.13),  # fewer than five steps
        (0.03, 0.031, 0.029, 0.03, 0.0305, 0.0295),
        (0.05, 0.04, 0.03, 0.02, 0.01),  # it shrinks
        (1e-6, 2e-6, 3e-6, 4e-6, 5e-6),  # rounding
    ],
)
def test_a_mismatch_that_does_not_grow_passes(means):
    assert stationary(series(*means)).ok


def test_a_constant_mismatch_with_scatter_is_rarely_called_growing():
    """t > 4 with 18 degrees of freedom has probability 4e-4: 3 of 200 by chance 1e-4."""
    gen = torch.Generator().manual_seed(0)
    noisy = (0.03 + 0.001 * torch.randn(200, 20, generator=gen)).tolist()
    assert sum(not stationary(series(*row)).ok for row in noisy) < 3


def test_every_verdict_has_its_metric():
    everything = {
        "gap/abs_engine": of(0.0),
        "weight/over_cap": of(0.0),
        "label/slope": of(0.0),
        "label/se": of(0.1),
        "kept/shortest_quarter": of(1.0, 4),
        "kept/longest_quarter": of(1.0, 4),
        "load/digest_differs": of(0.0),
        "probe/excess": of(0.5),
        "probe/growth": of(0.0),
        "probe/unknown": of(0.0),
        "grid/slope": of(1.0),
        "grid/se": of(0.1),
        "grid/size": of(1.0),
    }
    names = set(verdicts(everything, n_changed=1, precision="float32")) | {stationary([]).name}
    assert {f"health/{name}" for name in names} == {m for m in METRICS if m.startswith("health/")}


def test_a_version_that_nobody_knows_is_counted():
    gap = make_gap([[-1.0, -1.2], [-2.0, -1.0]], [[-1.01, -1.19], [-2.0, -1.0]])
    unknown = replace(gap, version=torch.tensor([10, -1, 10, 10]))
    assert correct(unknown, preset="tis").metrics["excluded/missing_version"].mean == 0.25
    assert "missing_version" in failed(unknown)
