"""The policy behind a cache that several versions wrote, against the engine that keeps one."""

from array import array
from contextlib import nullcontext

import torch

from support.embedded import Publisher, finish, load, request, tiny
from trueup.models.hybrid import hybrid_logprobs, writers
from trueup.models.load import borrowed_state, load_state, state_tensors
from trueup.models.logprobs import action_logprobs
from trueup.models.packed import PackedBatch


def packed(*rows: tuple[list[int], list[int]]) -> PackedBatch:
    return PackedBatch.pack([array("i", ids) for ids, _ in rows], [array("b", f) for _, f in rows])


def test_a_position_was_computed_by_the_version_that_sampled_the_next_action_token() -> None:
    # Positions:      0  1  2* 3* 4  5* 6     0  1*
    batch = packed(
        ([9, 8, 1, 2, 7, 3, 6], [0, 0, 1, 1, 0, 1, 0]),
        ([9, 4], [0, 1]),
    )
    found = writers(batch, torch.tensor([1, 2, 3, 5]))
    assert found.tolist() == [1, 1, 2, 3, 3, 3, 3, 5, 5]


def test_an_engine_that_keeps_its_cache_samples_from_the_hybrid_policy() -> None:
    models = {version: tiny("llama-gqa-tied-bias", seed=version) for version in (1, 2, 3)}
    publisher = Publisher()
    core = publisher.serving(models[1], kv_mode="keep")
    prompts = {"a": [3, 1, 4, 1, 5], "b": [2, 7]}
    for name, prompt in prompts.items():
        core.submit(request(name, prompt, 12, key=(len(name), prompt[0])))
    for version in (2, 3):
        for _ in range(4):
            core.step()
        load(core, publisher.publish(models[version]))
    ended = finish(core)
    rows = [
        (prompt + list(ended[name].token_ids), [0] * len(prompt) + [1] * 12)
        for name, prompt in prompts.items()
    ]
    batch = packed(*rows)
    version = torch.tensor([1] * 4 + [2] * 4 + [3] * 4).repeat(2)
    model = tiny("llama-gqa-tied-bias")
    logp = hybrid_logprobs(
        model,
        batch,
        writers(batch, version),
        under=lambda v: borrowed_state(model, state_tensors(models[v])),
    )
    said = torch.tensor([x for name in prompts for x in ended[name].logps])
    assert float((said - logp).abs().max()) < 1e-4
    load_state(model, state_tensors(models[3]))
    fresh = action_logprobs(model, batch).logp.detach()
    assert float((said - fresh)[version == 3].abs().mean()) > 0.01


def test_one_version_alone_is_the_plain_policy() -> None:
    model = tiny("qwen3")
    batch = packed(([1, 2, 3, 4, 5], [0, 0, 1, 0, 1]), ([6, 7], [0, 1]))
    found = hybrid_logprobs(
        model, batch, torch.full((7,), 4), under=lambda version: nullcontext(), temperature=0.7
    )
    expected = action_logprobs(model, batch, temperature=0.7).logp.detach()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
