import math

import pytest

from support.gaps import make_gap, ratio_gap
from trueup.corrections.compose import correct
from trueup.diagnostics.health import health

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
