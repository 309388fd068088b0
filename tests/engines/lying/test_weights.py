import pytest

from support.embedded import copied, logps, reference_logps, request, tiny
from support.lying import Rig, with_tensors
from trueup.engines.base import Engine

PROMPT = [1, 2, 3, 4]
OLD, NEW = 1, 2
"""Seeds of the weights of versions 1 and 2."""


def said_after_an_update(rig: Rig):
    """What an engine says after versions 1 and 2, and what it attested."""
    said = []

    async def script(engine: Engine) -> None:
        first, second = rig.publish(OLD), rig.publish(NEW)
        await engine.load(first)
        before = await engine.generate(request("a", PROMPT, 12))
        await engine.release("a")
        receipt = await engine.load(second)
        assert (receipt.version, receipt.digest) == (second.version, second.digest)
        after = await engine.generate(request("b", PROMPT, 12))
        assert [span.version for span in after.spans] == [2]
        assert (await engine.info()).version == 2
        said.extend([before, after])

    rig.play(script)
    return said


def off(completion, model) -> float:
    """Largest distance from what a model would have said, in nats."""
    expected = reference_logps(model, PROMPT, completion.token_ids)
    return float((logps(completion) - expected).abs().max())


def test_a_stale_head_is_the_old_head_on_the_new_body():
    before, after = said_after_an_update(Rig("stale_head"))
    old, new = tiny(seed=OLD), tiny(seed=NEW)
    hybrid = with_tensors(new, {"lm_head.weight": copied(old)["lm_head.weight"]})
    assert off(before, old) < 1e-4
    assert off(after, hybrid) < 1e-4
    assert off(after, new) > 0.1


@pytest.mark.parametrize("seed", [0, 1])
def test_an_old_tensor_is_one_matrix_of_a_block(seed):
    before, after = said_after_an_update(Rig("old_tensor", seed))
    old, new = copied(tiny(seed=OLD)), tiny(seed=NEW)
    matrices = [n for n, x in old.items() if x.dim() == 2 and ".layers." in n]
    fits = [n for n in matrices if off(after, with_tensors(new, {n: old[n]})) < 1e-4]
    assert len(fits) == 1
    assert off(before, tiny(seed=OLD)) < 1e-4
    assert off(after, new) > 1e-3


@pytest.mark.parametrize("seed", [0, 1])
def test_a_skipped_layer_is_a_model_without_it(seed):
    before, after = said_after_an_update(Rig("layer_skipped", seed))
    for completion, weights in ((before, OLD), (after, NEW)):
        without = []
        for index in (0, 1):
            model = tiny(seed=weights)
            del model.model.layers[index]
            model.config.num_hidden_layers = 1
            model.model.layers[0].self_attn.layer_idx = 0
            without.append(off(completion, model))
        assert min(without) < 1e-4
        assert off(completion, tiny(seed=weights)) > 0.1


def test_a_missed_update_is_served_one_load_later():
    before, after = said_after_an_update(Rig("missed_update"))
    assert off(before, tiny(seed=OLD)) < 1e-4
    assert off(after, tiny(seed=OLD)) < 1e-4
    assert off(after, tiny(seed=NEW)) > 0.1
