import dataclasses

import pytest
import torch

from trueup.testing.cases import CASES, Case, Step, Want, gaps, padded
from trueup.testing.judge import judge
from trueup.testing.own import correction
from trueup.testing.protocol import ALARMS, METRICS, Method, NotExpressible, Outcome


def test_the_rows_are_c1_to_c27():
    assert [case.number for case in CASES] == [f"C{i}" for i in range(1, 28)]


def test_every_name_that_a_row_asks_for_is_documented():
    wants = [step.want for case in CASES for step in case.steps]
    asked = {name for want in wants for name in want.metrics}
    assert asked | {name for case in CASES for name in case.merged} <= set(METRICS)
    assert {want.alarm for want in wants if want.alarm} == set(ALARMS)


@pytest.mark.timeout(600)  # C27 holds more than 2^24 tokens
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.number)
def test_trueup_passes_every_row(case):
    found = judge(case, correction)
    assert (found.status, found.reason) == ("pass", "")


def uncorrected(arrays, method, run):
    ones = arrays.action.float()
    return Outcome(weight=ones, keep=arrays.action, advantage=ones * 0, metrics={}, alarms=())


def test_weights_of_1_are_no_correction():
    light = [case for case in CASES if case.number != "C27"]
    status = {case.number: judge(case, uncorrected).status for case in light}
    # C10 and C17 compare metrics, of which there are none; C26 wants everything kept.
    assert [n for n, s in status.items() if s == "pass"] == ["C26"]
    assert {n for n, s in status.items() if s == "not expressible"} == {
        *("C7", "C8", "C9", "C10", "C15", "C17", "C18", "C20", "C21")
    }


ROWS = [[0.0, 0.5], [0.25]]
STEP = Step(arrays=lambda: gaps(ROWS), method=Method(), want=Want(weight=[[1, 2], [3]]))


def one(**want):
    return Case(number="X", title="x", steps=(dataclasses.replace(STEP, want=Want(**want)),))


def answering(**outcome):
    return lambda arrays, method, run: Outcome(**outcome)


WEIGHT = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
KEEP = torch.tensor([[True, False], [True, True]])


@pytest.mark.parametrize(
    ("want", "outcome", "status"),
    [
        ({"weight": [[1, 2], [3]]}, {"weight": WEIGHT}, "pass"),
        ({"weight": [[1, 2], [3.1]]}, {"weight": WEIGHT}, "fail"),
        ({"weight": [[1, 2], [3]]}, {}, "not expressible"),
        ({"keep": [[True, False], None]}, {"keep": KEEP}, "pass"),
        ({"keep": [[True, True], None]}, {"keep": KEEP}, "fail"),
        # Only what is kept has an advantage to look at; padding never has one.
        ({"advantage": [1, 3]}, {"advantage": WEIGHT, "keep": KEEP}, "pass"),
        ({"advantage": [1, 3]}, {"advantage": WEIGHT}, "fail"),
        ({"denominator": 3.0}, {"denominator": 3.0}, "pass"),
        ({"denominator": 3.0}, {"denominator": 4.0}, "fail"),
        ({"metrics": {"kept": 1.0}}, {"metrics": {"kept": 1.0}}, "pass"),
        ({"metrics": {"kept": 1.0}}, {"metrics": {"kept": 0.9}}, "fail"),
        ({"metrics": {"kept": 1.0}}, {"metrics": {}}, "not expressible"),
        ({}, {"metrics": {"other": float("nan")}}, "fail"),
        ({}, {"weight": WEIGHT / 0}, "fail"),
        ({"alarm": "never_applied"}, {"alarms": ("never_applied",)}, "pass"),
        ({"alarm": "never_applied"}, {"alarms": ()}, "fail"),
        ({"alarm": "never_applied"}, {}, "not expressible"),
        ({"refused": True}, {}, "fail"),
        ({"corrected": True}, {"weight": WEIGHT}, "pass"),
        ({"corrected": True}, {"weight": WEIGHT * 0 + 1}, "fail"),
        # What is wrong counts before what is missing.
        ({"weight": [[9, 9], [9]], "denominator": 3.0}, {"weight": WEIGHT}, "fail"),
    ],
)
def test_an_outcome_is_judged_by_what_is_wanted(want, outcome, status):
    assert judge(one(**want), answering(**outcome)).status == status


@pytest.mark.parametrize(
    ("error", "want", "status"),
    [
        (ValueError("no"), {"refused": True}, "pass"),
        (ValueError("no"), {}, "fail"),
        (NameError("no"), {"refused": True}, "fail"),
        (NotExpressible("no"), {"refused": True}, "not expressible"),
        (NotExpressible("no"), {}, "not expressible"),
    ],
)
def test_an_error_is_an_answer_unless_it_is_a_defect(error, want, status):
    def failing(arrays, method, run):
        raise error

    assert judge(one(**want), failing).status == status


def test_a_position_that_is_no_action_lies_between_those_that_are():
    made = padded([[-1.0, -2.0]], [[-3.0, -4.0]], hidden={(0, 1): (-8.0, -9.0)})
    assert made.target.tolist() == [[-1.0, -8.0, -2.0]]
    assert made.behaviour.tolist() == [[-3.0, -9.0, -4.0]]
    assert made.action.tolist() == [[True, False, True]]
    target, behaviour, row = made.packed()
    assert (target.tolist(), behaviour.tolist(), row.tolist()) == ([-1, -2], [-3, -4], [0, 0])
