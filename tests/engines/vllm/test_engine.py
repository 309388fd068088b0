"""The adapter against a server that misbehaves; with the real one: test_real.py, the contract."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from support.embedded import request
from support.fake_vllm import FakeVllm, serving
from trueup.engines.vllm.client import HttpClient
from trueup.engines.vllm.engine import VllmEngine, VllmOptions
from trueup.errors import ConfigError, EngineFault, TransportFault
from trueup.types import FinishReason, KVState, TensorEntry, WeightManifest

Script = Callable[[VllmEngine], Awaitable[None]]


def manifest(version: int, shape: tuple[int, ...] = (2, 3)) -> WeightManifest:
    entry = TensorEntry(name="w", dtype="float32", shape=shape, digest=f"{version:016x}")
    return WeightManifest(
        version=version,
        transport="shared_memory",
        location=f"/nowhere/version-{version}",
        digest=f"{version:016x}",
        tensors=(entry,),
        nbytes=24,
        n_changed=6,
    )


def play(
    fake: FakeVllm, script: Script, *, load: bool = True, call_s: float = 30.0, **options: Any
) -> list[str]:
    """Run a script against an engine; returns what became of the server: `killed` or nothing."""
    fate: list[str] = []
    given = {"engine_id": "e", "epoch": 2, "precision": "float32", **options}

    async def main(url: str) -> None:
        engine = VllmEngine(
            HttpClient(url, call_s=call_s),
            VllmOptions(**given),
            kill=lambda: fate.append("killed"),
            watch_s=0.05,
        )
        if load:
            await engine.load(manifest(1))
        await script(engine)
        fate.append("closing")
        await engine.close()

    with serving(fake) as url:
        asyncio.run(main(url))
    return fate[: fate.index("closing")]


async def some_tokens(fake: FakeVllm) -> None:
    while not any(route == "generate" for route, _ in fake.calls):
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)


def test_a_turn_is_asked_for_with_everything_that_decides_its_distribution() -> None:
    fake = FakeVllm()

    async def script(engine: VllmEngine) -> None:
        asked = {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
        said = await engine.generate(
            request("a", [1, 2, 3], 4, stop_ids=(15,), key=(3, 4), **asked)
        )
        assert list(said.token_ids) == [1, 8, 15]
        assert said.finish is FinishReason.STOP
        assert said.logps == array("f", [-0.5 - i / 64 for i in (1, 8, 15)])
        body = dict(fake.calls)["generate"]
        assert body["token_ids"] == [1, 2, 3]
        sent = body["sampling_params"]
        assert {key: sent[key] for key in asked} == asked
        assert (sent["stop_token_ids"], sent["ignore_eos"], sent["logprobs"]) == ([15], True, 0)
        assert 0 <= sent["seed"] < 2**63

    play(fake, script)


def test_equal_keys_seed_equal_noise_and_others_other() -> None:
    fake = FakeVllm()

    async def script(engine: VllmEngine) -> None:
        for key in ((1, 2), (1, 2), (1, 3)):
            await engine.generate(request("a", [1], 2, key=key))

    play(fake, script)
    seeds = [body["sampling_params"]["seed"] for route, body in fake.calls if route == "generate"]
    assert seeds[0] == seeds[1] != seeds[2]


def test_forced_ids_go_with_the_request() -> None:
    fake = FakeVllm()

    async def script(engine: VllmEngine) -> None:
        said = await engine.generate(request("a", [1], 3, forced=[5, 6, 7]))
        assert list(said.token_ids) == [5, 6, 7]

    play(fake, script)


def test_a_load_verifies_before_it_pauses_and_resumes_last() -> None:
    fake = FakeVllm()

    async def script(engine: VllmEngine) -> None:
        receipt = await engine.load(manifest(2))
        assert (receipt.version, receipt.digest) == (2, f"{2:016x}")
        assert receipt.prepare_s == 0.25
        assert 0 < receipt.pause_s <= receipt.t_end - receipt.t_start
        assert fake.routes() == [
            "server_info",
            "collective_rpc",  # connect
            "collective_rpc",  # stage
            "collective_rpc",  # staged
            "pause",
            "start_weight_update",
            "update_weights",
            "finish_weight_update",
            "collective_rpc",  # cached
            "reset_prefix_cache",
            "resume",
        ]

    play(fake, script, load=False)


@pytest.mark.parametrize(
    ("kv_mode", "kv", "context", "recomputed"),
    [("recompute", KVState.RECOMPUTED, (), True), ("keep", KVState.KEPT, (1, 2), False)],
)
def test_spans_split_where_the_server_says_and_name_what_became_of_the_cache(
    kv_mode: str, kv: KVState, context: tuple[int, ...], recomputed: bool
) -> None:
    fake = FakeVllm(token_s=0.005)

    async def script(engine: VllmEngine) -> None:
        turn = asyncio.create_task(engine.generate(request("a", [1, 2, 3], 60)))
        await some_tokens(fake)
        receipt = await engine.load(manifest(2))
        said = await turn
        old, new = said.spans
        assert (old.version, old.kv, old.context_versions) == (1, KVState.FRESH, ())
        assert (new.version, new.kv, new.context_versions) == (2, kv, context)
        assert (old.start, new.stop) == (0, 60)
        assert 0 < old.stop == new.start < 60
        assert said.tokens_recomputed == (3 + old.stop - 1 if recomputed else 0)
        assert receipt.tokens_recomputed == (11 if recomputed else 0)

    play(fake, script, kv_mode=kv_mode)
    flags = [route for route in fake.routes() if route == "reset_prefix_cache"]
    assert len(flags) == 2


def test_no_prefix_of_another_version_can_be_found() -> None:
    fake = FakeVllm()

    async def script(engine: VllmEngine) -> None:
        await engine.generate(request("a", [1], 2))
        await engine.load(manifest(2))
        await engine.generate(request("b", [1], 2))

    play(fake, script)
    salts = [body["cache_salt"] for route, body in fake.calls if route == "generate"]
    assert salts[0] != salts[1]


def test_a_next_turn_counts_what_was_cached_and_what_an_update_made_it_compute_again() -> None:
    fake = FakeVllm()

    async def script(engine: VllmEngine) -> None:
        first = await engine.generate(request("a", [1, 2, 3, 4, 5, 6], 4))
        assert (first.tokens_prefilled, first.tokens_cached) == (6, 0)
        prompt = [1, 2, 3, 4, 5, 6, *first.token_ids, 9]
        fake.cached = 8  # two blocks of 4 of the 9 known ids
        second = await engine.generate(request("a", prompt, 2))
        assert (second.tokens_prefilled, second.tokens_cached) == (3, 8)
        assert second.spans[0].kv is KVState.FRESH
        await engine.load(manifest(2))
        fake.cached = 0
        third = await engine.generate(request("a", [*prompt, *second.token_ids, 9], 2))
        # 12 ids were computed, all of whose 3 blocks would have been found.
        assert (third.tokens_recomputed, third.tokens_prefilled, third.tokens_cached) == (12, 2, 0)
        assert third.spans[0].kv is KVState.RECOMPUTED

    play(fake, script)


def without_logprobs(response: Any) -> None:
    response["choices"][0]["logprobs"] = None


def without_ids(response: Any) -> None:
    response["choices"][0]["token_ids"] = None


def one_logprob_less(response: Any) -> None:
    response["choices"][0]["logprobs"]["content"].pop()


def nan(response: Any) -> None:
    response["choices"][0]["logprobs"]["content"][1]["logprob"] = float("nan")


def positive(response: Any) -> None:
    response["choices"][0]["logprobs"]["content"][1]["logprob"] = 0.1


def impossible(response: Any) -> None:
    response["choices"][0]["logprobs"]["content"][1]["logprob"] = -9999.0


def of_another_token(response: Any) -> None:
    response["choices"][0]["logprobs"]["content"][1]["token_id"] += 1


def without_versions(response: Any) -> None:
    response["choices"][0]["weight_versions"] = None


def unnumbered_version(response: Any) -> None:
    response["choices"][0]["weight_versions"][0]["version"] = "default"


def gap_between_versions(response: Any) -> None:
    response["choices"][0]["weight_versions"][0]["start"] = 1


def appended_stop(response: Any) -> None:
    choice = response["choices"][0]
    choice["token_ids"].append(39)
    choice["logprobs"]["content"].append({"token_id": 39, "logprob": -1.0})
    choice["weight_versions"][0]["end"] += 1


def too_short(response: Any) -> None:
    choice = response["choices"][0]
    choice["token_ids"].pop()
    choice["logprobs"]["content"].pop()
    choice["weight_versions"][0]["end"] -= 1


def failed_inside(response: Any) -> None:
    response["choices"][0]["finish_reason"] = "error"


def nothing(response: Any) -> None:
    response["choices"] = []


SPOILT = [
    without_logprobs,
    without_ids,
    one_logprob_less,
    nan,
    positive,
    impossible,
    of_another_token,
    without_versions,
    unnumbered_version,
    gap_between_versions,
    appended_stop,
    too_short,
    failed_inside,
    nothing,
]


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_an_answer_that_cannot_be_trained_from_is_an_engine_fault(spoil: Any) -> None:
    fake = FakeVllm(spoil=spoil)

    async def script(engine: VllmEngine) -> None:
        with pytest.raises(EngineFault, match="vLLM"):
            await engine.generate(request("a", [1], 4, stop_ids=(39,)))
        fake.spoil = lambda response: None
        assert len((await engine.generate(request("a", [1], 4))).token_ids) == 4

    play(fake, script)


def test_replay_data_is_passed_on() -> None:
    def routed(response: Any) -> None:
        import base64
        import io

        import numpy as np

        # Prompt of 2 and 3 samples: 4 computed positions, 1 layer, 2 experts per token.
        table = np.arange(8, dtype=np.uint8).reshape(4, 1, 2)
        file = io.BytesIO()
        np.save(file, table)
        response["choices"][0]["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        response["choices"][0]["sampling_mask"] = [[1, 2], [8], []]

    async def script(engine: VllmEngine) -> None:
        said = await engine.generate(request("a", [1, 2], 3))
        assert said.replay is not None
        assert said.replay.kept_ids == (array("i", [1, 2]), array("i", [8]), array("i"))
        # The first sample was computed from position 1, the last of the prompt.
        assert said.replay.experts == array("h", [2, 3, 4, 5, 6, 7])

    play(FakeVllm(spoil=routed), script)


@pytest.mark.parametrize(
    ("section", "key", "value", "complaint"),
    [
        ("model_config", "logprobs_mode", "raw_logprobs", "processed_logprobs"),
        ("model_config", "dtype", "torch.bfloat16", "float32"),
        ("model_config", "quantization", "int8_per_channel_weight_only", "none"),
        ("parallel_config", "worker_extension_cls", "", "trueup.engines.vllm.worker.Extension"),
        ("weight_transfer_config", "backend", "nccl", "trueup"),
    ],
)
def test_a_server_that_cannot_be_trained_from_is_refused(
    section: str, key: str, value: str, complaint: str
) -> None:
    fake = FakeVllm()
    fake.config[section][key] = value

    async def script(engine: VllmEngine) -> None:
        with pytest.raises(ConfigError, match=complaint):
            await engine.load(manifest(1))

    play(fake, script, load=False)
    assert fake.routes() == ["server_info"]


def test_a_server_without_the_calls_for_updates_is_refused() -> None:
    async def script(engine: VllmEngine) -> None:
        with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE"):
            await engine.info()

    play(FakeVllm(broken={"server_info": 404}), script, load=False)


def test_a_version_that_does_not_verify_is_refused_with_the_old_one_served() -> None:
    fake = FakeVllm()

    async def script(engine: VllmEngine) -> None:
        fake.refused = "w must be whole, got 0"
        with pytest.raises(TransportFault, match="whole"):
            await engine.load(manifest(2))
        assert (await engine.info()).version == 1
        assert (await engine.generate(request("a", [1], 2))).spans[0].version == 1

    assert not play(fake, script)
    assert fake.routes().count("pause") == 1


@pytest.mark.parametrize("shapes", [{"w": (3, 2)}, {"w": (2, 3), "v": (1,)}, {}])
def test_foreign_tensors_are_refused_before_the_server_hears_of_them(
    shapes: dict[str, tuple[int, ...]],
) -> None:
    fake = FakeVllm()

    async def script(engine: VllmEngine) -> None:
        with pytest.raises(TransportFault):
            await engine.load(manifest(1))

    play(fake, script, load=False, expected=shapes)
    assert "pause" not in fake.routes()


@pytest.mark.parametrize(
    "route",
    [
        "pause",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "reset_prefix_cache",
        "resume",
    ],
)
def test_a_load_that_fails_in_the_pause_fences_the_engine(route: str) -> None:
    fake = FakeVllm()

    async def script(engine: VllmEngine) -> None:
        fake.broken = {route: 500}
        with pytest.raises(EngineFault, match=f"{route} is broken"):
            await engine.load(manifest(2))
        fake.broken = {}
        with pytest.raises(EngineFault, match="whole after an update"):
            await engine.generate(request("a", [1], 2))
        with pytest.raises(EngineFault, match="whole after an update"):
            await engine.load(manifest(3))

    assert play(fake, script) == ["killed"]


def test_a_label_that_did_not_change_fences_the_engine() -> None:
    fake = FakeVllm()

    async def script(engine: VllmEngine) -> None:
        fake.do_finish_weight_update = lambda query, body: {}  # type: ignore[method-assign]
        with pytest.raises(EngineFault, match="weight version"):
            await engine.load(manifest(2))

    assert play(fake, script) == ["killed"]


def test_a_server_that_goes_silent_ends_every_turn() -> None:
    fake = FakeVllm()

    async def script(engine: VllmEngine) -> None:
        fake.silent = {"generate", "weight_info"}
        turns = [engine.generate(request(name, [1], 2)) for name in "ab"]
        found = await asyncio.gather(*turns, return_exceptions=True)
        assert [type(error) for error in found] == [EngineFault, EngineFault]
        assert "answered within 0.2 s" in str(found[0])
        with pytest.raises(EngineFault, match="answered within"):
            await engine.generate(request("c", [1], 2))

    assert play(fake, script, call_s=0.2) == ["killed"]


def test_a_server_that_is_gone_says_how_it_ended() -> None:
    async def main() -> None:
        client = HttpClient("http://127.0.0.1:9", why_ended=lambda: "exit status -9: last words")
        engine = VllmEngine(client, VllmOptions(engine_id="e", epoch=0, precision="float32"))
        with pytest.raises(EngineFault, match="exit status -9: last words"):
            await engine.info()
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("status", [400, 500])
def test_an_error_status_fails_the_turn_and_not_the_engine(status: int) -> None:
    fake = FakeVllm()

    async def script(engine: VllmEngine) -> None:
        fake.broken = {"generate": status}
        with pytest.raises(EngineFault, match=f"answered {status}: generate is broken"):
            await engine.generate(request("a", [1], 2))
        fake.broken = {}
        await engine.generate(request("a", [1], 2))

    play(fake, script)


@pytest.mark.parametrize(
    ("prompt", "options", "complaint"),
    [
        ([], {}, "tokens"),
        ([1] * 250, {}, "256"),
        ([40], {}, r"\[0, 40\)"),
        ([1], {"temperature": 0.001}, "temperature"),
        ([1], {"forced": [1, 2]}, "max_tokens"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_here(
    prompt: list[int], options: dict[str, Any], complaint: str
) -> None:
    fake = FakeVllm()

    async def script(engine: VllmEngine) -> None:
        with pytest.raises(EngineFault, match=complaint):
            await engine.generate(request("a", prompt, 8, **options))

    play(fake, script)
    assert "generate" not in dict(fake.calls)


def test_a_cancelled_turn_is_aborted_at_the_server() -> None:
    fake = FakeVllm(token_s=0.01)

    async def script(engine: VllmEngine) -> None:
        turn = asyncio.create_task(engine.generate(request("a", [1], 200)))
        await some_tokens(fake)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert len(fake.aborted) == 1

    play(fake, script)


def test_turns_wait_while_weights_are_replaced() -> None:
    fake = FakeVllm()

    async def script(engine: VllmEngine) -> None:
        loading = asyncio.create_task(engine.load(manifest(2)))
        while not fake.paused.is_set():
            await asyncio.sleep(0.001)
        said = await engine.generate(request("a", [1], 2))
        assert [span.version for span in said.spans] == [2]
        assert dict(fake.calls)["generate"]["cache_salt"].startswith("2-")
        await loading

    play(fake, script)
