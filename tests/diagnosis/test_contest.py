import math

import pytest
import torch

from trueup.diagnosis.contest import Prediction, contest, slope


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_a_slope_and_its_error_by_hand():
    # Σxy / Σx² = (2 + 4) / 2 = 3; scores x(y − 3x) = (−1, 1) in two clusters: √(2 · 2/1) / 2 = 1.
    one = torch.tensor([0, 1])
    assert slope(tensor(2, 4), tensor(1, 1), [one]) == (3.0, pytest.approx(1.0))


def test_the_larger_of_two_clusterings_counts():
    y, x = tensor(2, 2, 4, 4), tensor(1, 1, 1, 1)
    each, pairs = torch.arange(4), torch.tensor([0, 0, 1, 1])
    # Scores (−1, −1, 1, 1): apart √(4 · 4/3) / 4, in pairs √(8 · 2) / 4 = 1.
    assert slope(y, x, [each])[1] == pytest.approx(math.sqrt(16 / 3) / 4)
    assert slope(y, x, [each, pairs])[1] == pytest.approx(1.0)


def test_one_cluster_says_nothing_and_no_change_has_no_slope():
    zeros = torch.zeros(2, dtype=torch.int64)
    assert slope(tensor(2, 4), tensor(1, 1), [zeros])[1] == math.inf
    assert slope(tensor(2, 4), tensor(0, 0), [zeros]) == (0.0, 0.0)


def judged(share, *, noise=0.1, tokens=400, seed=0):
    """y lies at `share` of the way from the clean prediction to that of a cause."""
    generator = torch.Generator().manual_seed(seed)
    change, other, error = torch.randn(3, tokens, dtype=torch.float64, generator=generator)
    clean = torch.full((tokens,), -1.0, dtype=torch.float64)
    predictions = [
        Prediction(cause="", logp=clean),
        Prediction(cause="a", logp=clean + 0.2 * change),
        Prediction(cause="b", logp=clean + 0.2 * (0.6 * change + 0.8 * other)),
    ]
    said = clean + 0.2 * share * change + noise * error
    row = torch.arange(tokens) // 4
    return contest(said, predictions, clusters=[row], among=torch.ones(tokens, dtype=torch.bool))


def test_the_nearest_prediction_wins_and_separates_from_a_correlated_one():
    found = judged(1.0)
    assert (found.winner.cause, found.index, found.rivals) == ("a", 1, ())
    assert abs(found.winner.slope - 1) < 4 * found.winner.error


def test_without_a_cause_nothing_wins():
    # A false winner needs a slope five standard errors beyond ½, where it is 0: never, in practice.
    assert [judged(0.0, seed=s).winner.cause for s in range(50)] == [""] * 50


def test_a_weak_cause_is_not_named():
    assert judged(1.0, noise=3.0, tokens=40).winner.cause == ""


def test_a_rival_that_predicts_the_same_is_said():
    clean = torch.full((100,), -1.0, dtype=torch.float64)
    change = torch.linspace(-1, 1, 100, dtype=torch.float64)
    alike = change + 1e-4 * torch.arange(100).remainder(2)
    generator = torch.Generator().manual_seed(0)
    noise = 0.1 * torch.randn(100, dtype=torch.float64, generator=generator)
    found = contest(
        clean + change + noise,
        [
            Prediction(cause="", logp=clean),
            Prediction(cause="a", logp=clean + change),
            Prediction(cause="b", logp=clean + alike),
        ],
        clusters=[torch.arange(100)],
        among=torch.ones(100, dtype=torch.bool),
    )
    assert {found.winner.cause, *found.rivals} == {"a", "b"}
