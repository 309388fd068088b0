"""Continuous batching, sessions, versions: what the core promises token by token."""

import gc
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from support.embedded import (
    VOCABULARY,
    Publisher,
    copied,
    finish,
    load,
    logps,
    reference_logps,
    request,
    tiny,
)
from trueup.engines.embedded.core import EmbeddedCore
from trueup.engines.embedded.parameters import Parameters
from trueup.errors import EngineFault, TransportFault
from trueup.models.load import state_tensors
from trueup.models.logprobs import action_logprobs
from trueup.models.packed import PackedBatch
from trueup.models.quantization.fake import quantized_logprobs
from trueup.models.quantization.schemes import SCHEMES
from trueup.sync.digest import digest
from trueup.types import FinishReason, KVState, WeightManifest


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (found - expected).abs()
    assert float(difference.mean()) <= 1e-5
    assert float(difference.max()) <= 1e-4


@pytest.mark.parametrize(
    "kind", ["llama", "llama-gqa-tied-bias", "qwen2", "qwen3", "gpt_neox", "opt"]
)
def test_log_probs_are_those_of_a_full_forward_over_turns_of_many_sessions(kind: str) -> None:
    model = tiny(kind)
    core = Publisher().serving(model, slots=5)
    prompts = {f"s{i}": list(range(1, 4 + 3 * i)) for i in range(5)}
    found, expected = [], []
    for turn in range(3):
        for i, (name, prompt) in enumerate(prompts.items()):
            core.submit(request(name, prompt, 2 + (i + turn) % 4, key=(i, turn), temperature=0.8))
        for name, said in finish(core).items():
            found.append(logps(said))
            expected.append(reference_logps(model, prompts[name], said.token_ids, 0.8))
            prompts[name] += [*said.token_ids, 5, 6, 7]
    assert_close(torch.cat(found), torch.cat(expected))


def test_truncated_log_probs_are_renormalised_on_the_kept_set() -> None:
    model = tiny()
    core = Publisher().serving(model)
    core.submit(request("a", [1, 2, 3], 30, top_k=3))
    said = finish(core)["a"]
    ids = torch.tensor([[1, 2, 3, *said.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, 2:-1].double()
    kept = logits.topk(3).values.logsumexp(-1)
    sampled = logits.gather(1, ids[0, 3:, None])[:, 0]
    assert_close(logps(said), sampled - kept)


def test_a_joining_request_samples_at_once_and_the_others_do_not_notice() -> None:
    model = tiny()
    publisher = Publisher()
    alone = publisher.serving(model)
    alone.submit(request("a", [1, 2, 3], 40, key=(1,)))
    undisturbed = finish(alone)["a"]
    core = publisher.serving(model)
    core.submit(request("a", [1, 2, 3], 40, key=(1,)))
    for _ in range(10):
        core.step()
    core.submit(request("b", list(range(30)), 1, key=(2,)))
    ended = core.step() + core.step()
    assert [said.session for said in ended] == ["b"]  # its first token, within two steps
    disturbed = finish(core)["a"]
    assert disturbed.token_ids == undisturbed.token_ids
    assert_close(logps(disturbed), logps(undisturbed))


def test_an_update_at_token_37_of_100_splits_the_spans_there() -> None:
    old, new = tiny(seed=1), tiny(seed=2)
    publisher = Publisher()
    core = publisher.serving(old)
    core.submit(request("a", [1, 2, 3], 100))
    for _ in range(37):
        core.step()
    assert load(core, publisher.publish(new)) == 3 + 36
    said = finish(core)["a"]
    spans = [(s.start, s.stop, s.version, s.kv) for s in said.spans]
    assert spans == [(0, 37, 1, KVState.FRESH), (37, 100, 2, KVState.RECOMPUTED)]
    assert said.tokens_recomputed == 39
    assert_close(logps(said)[:37], reference_logps(old, [1, 2, 3], said.token_ids)[:37])
    assert_close(logps(said)[37:], reference_logps(new, [1, 2, 3], said.token_ids)[37:])


def test_a_turn_without_a_token_at_the_swap_has_only_the_new_version() -> None:
    publisher = Publisher()
    core = publisher.serving(tiny(seed=1), slots=1)
    core.submit(request("holds the slot", [1, 2], 5))
    core.submit(request("waits", [1, 2, 3], 5))
    core.step()
    load(core, publisher.publish(tiny(seed=2)))
    finish(core)
    core.release("holds the slot")
    said = finish(core)["waits"]
    assert [(s.start, s.stop, s.version, s.kv) for s in said.spans] == [(0, 5, 2, KVState.FRESH)]
    assert said.tokens_recomputed == 0


def test_two_swaps_between_two_tokens_leave_one_span_and_one_recomputation() -> None:
    publisher = Publisher()
    core = publisher.serving(tiny(seed=1))
    core.submit(request("a", [1, 2, 3], 4))
    core.step()
    assert load(core, publisher.publish(tiny(seed=2))) == 3
    assert load(core, publisher.publish(tiny(seed=3))) == 0
    said = finish(core)["a"]
    assert [(s.start, s.stop, s.version) for s in said.spans] == [(0, 1, 1), (1, 4, 3)]
    assert said.tokens_recomputed == 3


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_recomputing_equals_a_fresh_engine_at_the_new_weights(kind: str) -> None:
    new = tiny(kind, seed=2)
    publisher = Publisher()
    core = publisher.serving(tiny(kind, seed=1))
    core.submit(request("a", [1, 2, 3, 4], 3))
    first = finish(core)["a"]
    load(core, publisher.publish(new))
    prompt = [1, 2, 3, 4, *first.token_ids, 9]
    core.submit(request("a", prompt, 20, key=(7,)))
    later = finish(core)["a"]
    fresh = publisher.serving(new)
    fresh.submit(request("a", prompt, 20, key=(7,)))
    expected = finish(fresh)["a"]
    assert later.token_ids == expected.token_ids
    assert_close(logps(later), logps(expected))
    assert later.spans[0].kv is KVState.RECOMPUTED
    assert expected.spans[0].kv is KVState.FRESH
    assert (later.tokens_recomputed, later.tokens_prefilled, later.tokens_cached) == (6, 2, 0)


def test_a_prompt_that_departs_from_the_cache_reuses_what_is_common() -> None:
    model = tiny()
    core = Publisher().serving(model)
    core.submit(request("a", [1, 2, 3, 4, 5, 6], 3))
    finish(core)
    prompt = [1, 2, 3, 9, 5, 6, 7]
    core.submit(request("a", prompt, 3))
    said = finish(core)["a"]
    assert (said.tokens_cached, said.tokens_prefilled) == (3, 4)
    assert_close(logps(said), reference_logps(model, prompt, said.token_ids))


def test_the_same_prompt_again_computes_its_last_token_only() -> None:
    core = Publisher().serving(tiny())
    core.submit(request("a", [1, 2, 3], 3))
    first = finish(core)["a"]
    core.submit(request("a", [1, 2, 3], 3))
    again = finish(core)["a"]
    assert (again.tokens_cached, again.tokens_prefilled) == (2, 1)
    assert again.token_ids == first.token_ids


def test_sessions_without_a_slot_wait_in_the_order_of_their_requests() -> None:
    core = Publisher().serving(tiny(), slots=1)
    for name in ("a", "b", "c"):
        core.submit(request(name, [1, 2], 2))
    order = []
    while core.busy:
        for said in core.step():
            order.append(said.session)
            core.release(said.session)
    assert order == ["a", "b", "c"]


def test_an_idle_session_keeps_its_slot_until_it_is_released() -> None:
    core = Publisher().serving(tiny(), slots=1)
    core.submit(request("a", [1, 2], 2))
    first = finish(core)["a"]
    core.submit(request("b", [1, 2], 2))
    assert not core.busy
    core.submit(request("a", [1, 2, *first.token_ids, 3], 2))  # is not queued behind b
    assert finish(core)["a"].tokens_cached == 3
    core.release("a")
    assert list(finish(core)) == ["b"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request("ep-7", [1] * 250, 7), "ep-7.*256"),
        (request("ep-7", [], 2), "ep-7.*256"),
        (request("ep-7", [1, VOCABULARY], 2), r"ep-7.*prompt_ids.*\[0, 40\)"),
        (request("ep-7", [-1, 3], 2), "ep-7.*prompt_ids"),
        (request("ep-7", [1], 0), "ep-7.*sampling"),
        (request("ep-7", [1], 2, temperature=0.0), "ep-7.*sampling"),
        (request("ep-7", [1], 2, top_p=0.0), "ep-7.*sampling"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_its_session(asked, message) -> None:
    core = Publisher().serving(tiny())
    with pytest.raises(EngineFault, match=message):
        core.submit(asked)
    assert not core.busy


def test_the_last_position_of_the_model_can_be_sampled() -> None:
    model = tiny()
    core = Publisher().serving(model)
    prompt = [i % VOCABULARY for i in range(250)]
    core.submit(request("a", prompt, 6))
    said = finish(core)["a"]
    assert_close(logps(said), reference_logps(model, prompt, said.token_ids))


def test_non_finite_logits_fault_their_session_alone() -> None:
    model = tiny()
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
        model.get_output_embeddings().weight[7] = 0.0
    publisher = Publisher()
    core = publisher.serving(model, slots=2)
    core.submit(request("bad", [1, 7, 2], 5))
    core.submit(request("good", [1, 2, 3], 5, top_k=1))
    ended = finish(core)
    assert list(ended) == ["good"]
    assert all(torch.isfinite(logps(ended["good"])))
    ((name, fault),) = core.take_faults()
    assert name == "bad"
    assert "bad" in str(fault)
    assert core.take_faults() == []
    core.submit(request("next in its slot", [1, 2, 3], 5, top_k=1))
    assert finish(core)["next in its slot"].token_ids == ended["good"].token_ids


def flipped(tensors, name):
    tensors[name].view(torch.uint8).view(-1)[5] ^= 1


def dropped(tensors, name):
    del tensors[name]


def foreign(tensors, name):
    tensors["foreign"] = tensors[name]


def reshaped(tensors, name):
    tensors[name] = tensors[name][:-1]


def retyped(tensors, name):
    tensors[name] = tensors[name].to(torch.bfloat16)


@pytest.mark.parametrize("damage", [flipped, dropped, foreign, reshaped, retyped])
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "lm_head.weight"])
def test_a_version_that_does_not_arrive_whole_changes_nothing(damage, name) -> None:
    old, new = tiny(seed=1), tiny(seed=2)
    manifest = Publisher().publish(new)
    arriving = dict(copied(new))
    damage(arriving, name)
    versions = {1: copied(old), 2: arriving}
    core = EmbeddedCore(
        old, engine_id="e", slots=2, fetch=lambda asked: versions[asked.version], digest=digest
    )
    load(core, replace(manifest, version=1, digest=digest(versions[1])))
    with pytest.raises(TransportFault, match="version 2"):
        core.stage(replace(manifest, version=2))
    with pytest.raises(EngineFault, match="stage"):
        core.swap()
    core.submit(request("a", [1, 2, 3], 5))
    said = finish(core)["a"]
    assert said.spans[0].version == 1
    assert_close(logps(said), reference_logps(old, [1, 2, 3], said.token_ids))
    versions[2] = copied(new)  # the same version, sent again and whole
    load(core, replace(manifest, version=2))
    assert (core.version, core.attest()) == (2, manifest.digest)


def serving_memory(core: EmbeddedCore) -> dict[str, torch.Tensor]:
    served: Any = core._weights._serving
    parameters = served if isinstance(served, Parameters) else served.memory._parameters
    return {**parameters.named, **parameters.fused}


def test_engine_memory_is_the_engines_own() -> None:
    model = tiny()
    handed = dict(copied(model))
    manifest = Publisher().publish(model)
    core = EmbeddedCore(model, engine_id="e", slots=2, fetch=lambda _: handed, digest=digest)
    load(core, manifest)
    outside = {t.data_ptr() for t in (*handed.values(), *state_tensors(model).values())}
    assert not outside & {t.data_ptr() for t in serving_memory(core).values()}
    with torch.no_grad():
        for tensor in (*handed.values(), *state_tensors(model).values()):
            tensor.zero_()
    assert core.attest() == manifest.digest


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_a_byte_flipped_in_the_memory_that_is_served_is_attested(kind: str) -> None:
    publisher = Publisher()
    core = publisher.core(tiny(kind))
    manifest = publisher.publish(tiny(kind))
    load(core, manifest)
    assert core.attest() == manifest.digest
    for tensor in serving_memory(core).values():  # the fused storages, which the forward reads, too
        byte = tensor.view(torch.uint8).view(-1)[3:4]
        byte ^= 1
        assert core.attest() != manifest.digest
        byte ^= 1
    assert core.attest() == manifest.digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_repacked_weights_are_attested_from_the_memory_that_multiplies(dtype: str) -> None:
    large = {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": True}
    model = tiny(dtype=dtype, **large)
    publisher = Publisher()
    core = publisher.core(model)
    manifest = publisher.publish(model)
    load(core, manifest)
    # What oneDNN has in its own order is not held a second time.
    assert "model.layers.0.mlp.gate_proj.weight" not in serving_memory(core)
    assert "model.embed_tokens.weight" in serving_memory(core)
    assert core.attest() == manifest.digest
    core.submit(request("a", [1, 2, 3], 8))
    said = finish(core)["a"]
    noise = (logps(said) - reference_logps(model, [1, 2, 3], said.token_ids)).abs().mean()
    assert noise < (1e-5 if dtype == "float32" else 0.1)


@pytest.mark.parametrize("quantize", ["none", "int8", "fp8_cast_all"])
def test_the_memory_of_a_replaced_version_is_free_at_once(quantize: str) -> None:
    large = {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": True}
    publisher = Publisher()
    core = publisher.serving(tiny(**large), quantize=quantize)
    gone = weakref.ref(core._weights._serving.memory)
    gc.disable()
    try:
        load(core, publisher.publish(tiny(seed=1, **large)))
        assert gone() is None
    finally:
        gc.enable()


def test_a_published_model_that_trains_on_does_not_reach_the_engine() -> None:
    model = tiny(seed=1)
    core = Publisher().serving(model)
    core.submit(request("a", [1, 2, 3], 10))
    core.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    said = finish(core)["a"]
    assert_close(logps(said), reference_logps(tiny(seed=1), [1, 2, 3], said.token_ids))


def test_two_engines_serve_different_versions_side_by_side() -> None:
    old, new = tiny(seed=1), tiny(seed=2)
    publisher = Publisher()
    cores = [publisher.serving(old, engine_id="e0"), publisher.serving(new, engine_id="e1")]
    for core in cores:
        core.submit(request("a", [1, 2, 3], 20))
    for core, model, version in zip(cores, (old, new), (1, 2), strict=True):
        said = finish(core)["a"]
        assert (said.spans[0].version, said.spans[0].engine) == (version, f"e{version - 1}")
        assert_close(logps(said), reference_logps(model, [1, 2, 3], said.token_ids))


def test_a_core_serves_a_directory(tmp_path) -> None:
    from trueup.models.load import save_model

    model = tiny()
    save_model(model, tmp_path / "model")
    publisher = Publisher()
    core = EmbeddedCore(
        tmp_path / "model",
        engine_id="e",
        slots=1,
        fetch=publisher.transport.fetch,
        digest=digest,
    )
    load(core, publisher.publish(model))
    core.submit(request("a", [1, 2, 3], 5))
    said = finish(core)["a"]
    assert_close(logps(said), reference_logps(model, [1, 2, 3], said.token_ids))


def test_bfloat16_spans_say_so_and_log_probs_stay_near_the_module() -> None:
    model = tiny(dtype="bfloat16")
    core = Publisher().serving(model)
    core.submit(request("a", [1, 2, 3], 50))
    said = finish(core)["a"]
    assert said.spans[0].precision == "bfloat16"
    difference = logps(said) - reference_logps(model, [1, 2, 3], said.token_ids)
    assert 0 < float(difference.abs().mean()) < 0.05  # bfloat16 in another order of summation


def test_a_model_of_another_dtype_is_refused() -> None:
    with pytest.raises(EngineFault, match=r"model\.dtype must be bfloat16"):
        EmbeddedCore(
            tiny(), engine_id="e", slots=1, dtype="bfloat16", fetch=lambda _: {}, digest=digest
        )


def test_a_released_turn_returns_what_it_had_sampled() -> None:
    core = Publisher().serving(tiny(), slots=1)
    core.submit(request("a", [1, 2, 3], 9))
    core.submit(request("b", [1, 2, 3], 9))
    core.step(), core.step()
    running, waiting, unknown = core.release("a"), core.release("b"), core.release("c")
    assert running is not None
    assert waiting is not None
    assert unknown is None
    assert (running.finish, len(running.token_ids), running.spans[-1].stop) == (
        FinishReason.ABORT,
        2,
        2,
    )
    assert (waiting.finish, len(waiting.token_ids), waiting.spans) == (FinishReason.ABORT, 0, ())
    assert not core.busy


def test_a_stop_id_ends_a_turn_with_it_and_the_next_turn_sees_it_cached() -> None:
    core = Publisher().serving(tiny())
    core.submit(request("a", [1, 2, 3], 50, stop_ids=tuple(range(0, VOCABULARY, 3))))
    said = finish(core)["a"]
    assert said.finish is FinishReason.STOP
    assert said.token_ids[-1] % 3 == 0
    assert all(token % 3 for token in said.token_ids[:-1])
    core.submit(request("a", [1, 2, 3, *said.token_ids, 4], 1))
    assert finish(core)["a"].tokens_cached == 3 + len(said.token_ids) - 1


def test_many_sessions_over_few_slots_keep_their_spans_whole() -> None:
    publisher = Publisher()
    core = publisher.serving(tiny(seed=0), slots=3)
    for i in range(20):
        core.submit(request(f"s{i}", [1 + i % 5] * (1 + i), 1 + i % 7, key=(i,)))
    ended = []
    while core.busy:
        for said in core.step():
            ended.append(said)
            core.release(said.session)
            if len(ended) % 6 == 0:
                load(core, publisher.publish(tiny(seed=len(ended))))
    assert sorted(said.session for said in ended) == sorted(f"s{i}" for i in range(20))
    for said in ended:
        n = 1 + int(said.session[1:]) % 7
        assert len(said.token_ids) == len(said.logps) == n
        assert (said.spans[0].start, said.spans[-1].stop) == (0, n)
        assert all(a.stop == b.start and a.version < b.version for a, b in pairwise(said.spans))


def test_an_empty_core_attests_nothing(tmp_path) -> None:
    core = Publisher().core(tiny())
    with pytest.raises(EngineFault, match="empty"):
        core.attest()


def test_the_manifest_is_asked_for_by_the_engine_that_loads_it() -> None:
    asked: list[WeightManifest] = []
    model = tiny()
    manifest = Publisher().publish(model)

    def fetch(wanted: WeightManifest) -> dict[str, torch.Tensor]:
        asked.append(wanted)
        return dict(copied(model))

    core = EmbeddedCore(model, engine_id="e", slots=1, fetch=fetch, digest=digest)
    assert core.stage(manifest) == manifest.digest
    assert core.version == -1
    core.swap()
    assert (core.version, asked) == (manifest.version, [manifest])


def test_the_samples_of_a_group_share_one_prefill() -> None:
    model = tiny("llama-gqa-tied-bias")
    core = Publisher().serving(model, slots=4)
    prompt = [1 + i % 30 for i in range(40)]
    for i in range(4):
        core.submit(request(f"s{i}", prompt, 6, key=(i,)))
    ended = finish(core)
    assert [ended[f"s{i}"].tokens_prefilled for i in range(4)] == [40, 1, 1, 1]
    assert [ended[f"s{i}"].tokens_cached for i in range(4)] == [0, 39, 39, 39]
    for said in ended.values():
        assert_close(logps(said), reference_logps(model, prompt, said.token_ids))
        assert said.spans[0].kv is KVState.FRESH


def test_a_shared_prompt_outlives_its_first_owner_and_no_swap() -> None:
    publisher = Publisher()
    core = publisher.serving(tiny(), slots=3)
    prompt = [1 + i % 30 for i in range(40)]
    core.submit(request("first", prompt, 2))
    finish(core)
    core.submit(request("second", prompt, 2, key=(1,)))
    assert finish(core)["second"].tokens_cached == 39
    core.release("first")
    core.submit(request("third", prompt, 2, key=(2,)))
    assert finish(core)["third"].tokens_cached == 39
    core.release("third")
    model = tiny(seed=1)
    load(core, publisher.publish(model))
    core.submit(request("fourth", prompt, 4, key=(3,)))
    said = finish(core)["fourth"]
    assert said.tokens_cached == 0
    assert_close(logps(said), reference_logps(model, prompt, said.token_ids))


def test_without_a_prefix_cache_every_turn_computes_its_whole_prompt() -> None:
    model = tiny()
    core = Publisher().serving(model, slots=2, prefix_cache=False)
    prompt = list(range(1, 36))
    core.submit(request("a", prompt, 3))
    core.submit(request("b", prompt, 3, key=(1,)))
    ended = finish(core)
    again = prompt + list(ended["a"].token_ids) + [5]
    core.submit(request("a", again, 3))
    second = finish(core)["a"]
    found = [(said.tokens_prefilled, said.tokens_cached) for said in (ended["b"], second)]
    assert found == [(35, 0), (39, 0)]
    assert_close(logps(second), reference_logps(model, again, second.token_ids))


def hybrid_logps(blocks: Sequence[tuple[Any, Sequence[int]]], sampled: int) -> torch.Tensor:
    """Log-probs of the last tokens, each block's keys and values written by its own model."""
    from transformers import DynamicCache

    cache, logits = DynamicCache(), []
    for model, ids in blocks:
        with torch.no_grad():
            logits.append(model(input_ids=torch.tensor([ids]), cache=cache).logits[0])
    tokens = torch.tensor([token for _, ids in blocks for token in ids])[-sampled:]
    found = torch.cat(logits)[-sampled - 1 : -1].double().log_softmax(-1)
    return found.gather(1, tokens[:, None])[:, 0]


def test_kept_keys_and_values_make_a_hybrid_policy_that_its_span_names() -> None:
    old, new, newest = tiny(seed=1), tiny(seed=2), tiny(seed=3)
    publisher = Publisher()
    core = publisher.serving(old, kv_mode="keep")
    prompt = [3, 1, 4, 1, 5]
    core.submit(request("a", prompt, 10))
    for _ in range(4):
        core.step()
    assert load(core, publisher.publish(new)) == 0
    first = finish(core)["a"]
    assert [(s.start, s.stop, s.version, s.kv, s.context_versions) for s in first.spans] == [
        (0, 4, 1, KVState.FRESH, ()),
        (4, 10, 2, KVState.KEPT, (1,)),
    ]
    ids = prompt + list(first.token_ids)
    # The fourth sample is computed, and its keys and values written, by the new weights.
    assert_close(logps(first), hybrid_logps([(old, ids[:8]), (new, ids[8:])], 10))
    load(core, publisher.publish(newest))
    core.submit(request("a", [*ids, 9, 2], 3))
    second = finish(core)["a"]
    (span,) = second.spans
    assert (span.version, span.kv, span.context_versions) == (3, KVState.KEPT, (1, 2))
    assert second.tokens_cached == len(ids) - 1
    rest = [ids[-1], 9, 2, *second.token_ids]
    blocks = [(old, ids[:8]), (new, ids[8:-1]), (newest, rest)]
    assert_close(logps(second), hybrid_logps(blocks, 3))


def test_a_turn_that_departs_from_kept_positions_forgets_who_wrote_them() -> None:
    publisher = Publisher()
    core = publisher.serving(tiny(seed=1), kv_mode="keep")
    core.submit(request("a", [1, 2, 3, 4, 5, 6], 2))
    finish(core)
    load(core, publisher.publish(tiny(seed=2)))
    core.submit(request("a", [7, 2, 3, 4], 2))
    (span,) = finish(core)["a"].spans
    assert (span.version, span.kv, span.context_versions) == (2, KVState.FRESH, ())


def test_truncated_sampling_returns_the_mass_it_kept() -> None:
    model = tiny()
    core = Publisher().serving(model)
    core.submit(request("cut", [1, 2, 3], 6, top_p=0.6, temperature=0.8))
    core.submit(request("whole", [1, 2, 3], 6))
    ended = finish(core)
    said = ended["cut"]
    assert said.replay is not None
    assert said.replay.kept_mass is not None
    full = reference_logps(model, [1, 2, 3], said.token_ids, temperature=0.8)
    kept = torch.tensor(said.replay.kept_mass, dtype=torch.float64)
    assert_close(logps(said) + kept.log(), full)
    assert float(kept.min()) >= 0.6 - 1e-6
    whole = ended["whole"].replay
    assert whole is None


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_a_quantised_engine_samples_what_the_quantised_forward_of_the_trainer_says(
    name: str,
) -> None:
    model = tiny("qwen2", hidden_size=64, intermediate_size=96)
    core = Publisher().serving(model, quantize=name, slots=1)
    prompt = [1, 2, 3, 4, 5]
    core.submit(request("a", prompt, 12))
    said = finish(core)["a"]
    assert said.spans[0].precision == f"float32+{name}"
    scales = None
    if SCHEMES[name].one_scale:  # depends on what else was in the forward: only the engine knows
        assert said.replay is not None
        scales = torch.tensor(said.replay.scales).view(12, 7 * model.config.num_hidden_layers)
    ids, flags = array("i", prompt) + said.token_ids, array("b", [0] * 5 + [1] * 12)
    batch = PackedBatch.pack([ids], [flags])
    plain = action_logprobs(model, batch).logp.double()
    same = quantized_logprobs(model, batch, SCHEMES[name], scales=scales).double()
    gap = (logps(said) - plain).abs().mean()
    assert (logps(said) - same).abs().mean() < 0.3 * gap


def test_quantised_memory_is_attested_as_the_version_it_was_made_of() -> None:
    publisher = Publisher()
    core = publisher.core(tiny(), quantize="int8")
    manifest = publisher.publish(tiny())
    load(core, manifest)
    assert core.attest() == manifest.digest
    layer = core._network._bound.layers[1].down
    layer._scales[3] *= 1.5
    assert core.attest() != manifest.digest


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_recomputing_a_cache_scores_the_tokens_before_under_the_new_weights(kind: str) -> None:
    publisher, new = Publisher(), tiny(kind, seed=1)
    core = publisher.serving(tiny(kind))
    prompt = [1, 2, 3]
    core.submit(request("a", prompt, 10, temperature=0.7))
    core.submit(request("b", prompt, 10, key=(1,)))
    for _ in range(4):
        core.step()
    load(core, publisher.publish(new))
    ended = finish(core)
    for name, temperature in (("a", 0.7), ("b", 1.0)):
        said = ended[name]
        (again,) = said.rescored
        assert (again.version, again.start, len(again.logps)) == (2, 0, 4)
        expected = reference_logps(new, prompt, said.token_ids, temperature)[:4]
        assert_close(torch.tensor(list(again.logps), dtype=torch.float64), expected)
