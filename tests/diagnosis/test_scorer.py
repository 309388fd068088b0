import copy

import pytest
import torch

from support.blind import versions
from support.embedded import reference_logps, tiny
from trueup.diagnosis.rollouts import Rollouts
from trueup.diagnosis.scorer import Scorer, Serving
from trueup.diagnosis.stored import _pair
from trueup.models.load import state_tensors
from trueup.types import Span


def rollouts(*pairs, temperature=1.0, version=0):
    from array import array

    made = []
    for index, (prompt, ids) in enumerate(pairs):
        span = Span(
            start=0,
            stop=len(ids),
            version=version,
            engine="e",
            epoch=0,
            precision="float32",
            temperature=temperature,
        )
        logps = array("f", [-1.0] * len(ids))
        made.append(
            _pair(f"s{index}", array("i", prompt), array("i", ids), logps, (span,), len(ids))
        )
    return Rollouts(requests=tuple(r for r, _ in made), completions=tuple(c for _, c in made))


def weights(model):
    return {name: tensor.clone() for name, tensor in state_tensors(model).items()}


PAIRS = (([1, 2, 3], [4, 5, 6, 7]), ([8, 9], [10, 11, 12]))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_a_full_forward(temperature):
    model = tiny(seed=1)
    found = Scorer(tiny(seed=2)).logp(
        rollouts(*PAIRS, temperature=temperature), Serving(weights=weights(model))
    )
    want = torch.cat([reference_logps(model, p, s, temperature) for p, s in PAIRS])
    torch.testing.assert_close(found, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["llama", "llama-gqa-tied-bias"])
def test_another_head_leaves_a_tied_embedding_alone(kind):
    model, other = tiny(kind, seed=1), tiny(kind, seed=2)
    scorer = Scorer(tiny(kind, seed=3))
    head = other.get_output_embeddings().weight.detach()
    mixed = copy.deepcopy(model)
    mixed.lm_head.weight = torch.nn.Parameter(head.clone())
    serving = Serving(weights=weights(model), head=head)
    want = torch.cat([reference_logps(mixed, p, s) for p, s in PAIRS])
    torch.testing.assert_close(scorer.logp(rollouts(*PAIRS), serving), want, rtol=0, atol=2e-6)
    again = scorer.logp(rollouts(*PAIRS), Serving(weights=weights(model)))
    plain = torch.cat([reference_logps(model, p, s) for p, s in PAIRS])
    torch.testing.assert_close(again, plain, rtol=0, atol=2e-6)


def test_a_skipped_layer_adds_nothing():
    model = tiny(seed=1)
    zeroed = weights(model)
    for name in zeroed:
        if "layers.1." in name and ("o_proj" in name or "down_proj" in name):
            zeroed[name] = torch.zeros_like(zeroed[name])
    scorer = Scorer(tiny(seed=1))
    skipped = scorer.logp(rollouts(*PAIRS), Serving(weights=weights(model), skipped=1))
    want = scorer.logp(rollouts(*PAIRS), Serving(weights=zeroed))
    torch.testing.assert_close(skipped, want, rtol=0, atol=2e-6)


def test_behind_keys_and_values_of_its_own_a_version_scores_as_ever():
    model = tiny(seed=1)
    serving, scorer = Serving(weights=weights(model)), Scorer(tiny(seed=1))
    cached = torch.tensor([4, 0])
    found = scorer.behind(rollouts(*PAIRS), serving, serving, cached)
    whole = scorer.logp(rollouts(*PAIRS), serving)
    # Positions 0 ... 3 of the first sequence are cached: its first two samples are predicted there.
    assert torch.isnan(found[:2]).all()
    torch.testing.assert_close(found[2:], whole[2:], rtol=0, atol=2e-6)


def test_behind_older_keys_and_values_it_does_not():
    old, new = versions(0)
    scorer = Scorer(copy.deepcopy(old))
    serve = [Serving(weights=weights(m)) for m in (old, new)]
    found = scorer.behind(rollouts(*PAIRS), *serve, torch.tensor([3, 2]))
    whole = scorer.logp(rollouts(*PAIRS), serve[1])
    after = torch.isfinite(found)
    assert after.tolist() == [False, True, True, True, False, True, True]
    assert ((found - whole)[after].abs() > 1e-5).all()


def test_the_derivative_along_a_change_is_what_a_small_change_does():
    model = tiny(seed=1)
    own = weights(model)
    name = "model.layers.0.mlp.up_proj.weight"
    generator = torch.Generator().manual_seed(0)
    change = torch.randn(own[name].shape, generator=generator)
    data, scorer = rollouts(*PAIRS), Scorer(tiny(seed=1).double())
    factor = torch.linspace(-1, 1, 7, dtype=torch.float64)
    along = scorer.along(data, Serving(weights=own), factor, {name: change})
    step = 1e-3
    ends = [
        scorer.logp(data, Serving(weights={**own, name: own[name] + s * step * change}))
        for s in (1, -1)
    ]
    slope = float(((ends[0] - ends[1]) * factor).sum()) / (2 * step)
    assert along[name] == pytest.approx(slope, rel=0.02, abs=1e-3)
