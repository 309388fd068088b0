"""A one-step problem whose gradient is known exactly, reproduced from recorded values.

Softmax over V tokens with logits z = 2·N(0,1), reward N(0,1), sampler logits z + σ·N(0,1); N draws,
batch-mean baseline, REPS repeats; squared bias and variance relative to ‖π⊙(r − E r)‖².
"""

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from trueup.corrections.masked import inside
from trueup.corrections.truncated import importance, truncated

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "estimators.json").read_text())
SIGMAS = ("0.1", "0.5", "1.0", "2.0")
# In the order of the recorded draws.
WEIGHTS = {
    "none": torch.ones_like,
    "full IS": importance,
    "TIS C=2": lambda d: truncated(d, cap=2.0),
    "MIS [0.5, 5]": lambda d: torch.where(inside(d, low=0.5, high=5.0), importance(d), 0.0),
}


@cache
def table():
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(GOLDEN["seed"])
    V, N, R = GOLDEN["V"], GOLDEN["N"], GOLDEN["REPS"]
    z, reward = 2.0 * torch.randn(V, generator=gen), torch.randn(V, generator=gen)
    target = torch.log_softmax(z, -1)
    pi = target.exp()
    truth = pi * (reward - (pi * reward).sum())
    scale = truth.square().sum()
    found = {}
    for sigma in SIGMAS:
        behaviour = torch.log_softmax(z + float(sigma) * torch.randn(V, generator=gen), -1)
        for name, weigh in WEIGHTS.items():
            a = torch.multinomial(behaviour.exp().expand(R, V), N, replacement=True, generator=gen)
            advantage = reward[a] - reward[a].mean(-1, keepdim=True)
            coefficient = weigh(target[a] - behaviour[a]) * advantage  # [R, N]
            # mean over samples of c·(onehot(a) − π), without the [R, N, V] one-hot
            hits = torch.zeros(R, V).scatter_add(1, a, coefficient)
            grads = (hits - coefficient.sum(1, keepdim=True) * pi) / N
            bias = (grads.mean(0) - truth).square().sum() / scale
            found[sigma, name] = float(bias), float(grads.var(0).sum() / scale)
    return found


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_bias_and_variance_equal_the_recorded_ones(sigma, name):
    expected = GOLDEN["results"][sigma][name]
    bias, variance = table()[sigma, name]
    # Only the order of float32 additions differs from the recorded run.
    assert bias == pytest.approx(expected["bias2"], rel=1e-4)
    assert variance == pytest.approx(expected["var"], rel=1e-5)


def test_the_printed_table_is_reproduced_digit_for_digit():
    printed = {
        "0.1": ".012 .166 .000 .133 .000 .131 .000 .132",
        "0.5": ".046 .166 .000 .152 .001 .138 .002 .150",
        "1.0": ".291 .117 .000 1.300 .265 .163 .368 .190",
        "2.0": ".737 .043 .005 10.202 .741 .074 .819 .127",
    }
    for sigma, line in printed.items():
        cells = [f"{x:.3f}" for name in WEIGHTS for x in table()[sigma, name]]
        assert cells == [f"{float(x):.3f}" for x in line.split()]
