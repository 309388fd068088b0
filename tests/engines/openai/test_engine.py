import asyncio
import json
import math
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from support.embedded import request
from support.openai_server import VOCABULARY, Behaviour, log_softmax, logits, serving
from trueup.config import EngineConfig
from trueup.engines.http import Address, JsonClient
from trueup.engines.openai.build import build
from trueup.engines.openai.engine import OpenAIEngine
from trueup.engines.openai.semantics import LogprobMode
from trueup.errors import CheckpointError, ConfigError, EngineFault
from trueup.types import FinishReason, WeightManifest

MANIFEST = WeightManifest(
    version=1, transport="none", location="", digest="0", tensors=(), nbytes=0, n_changed=0
)
BOTH = LogprobMode(temperature=True, top_p=True, top_k=True)


def engine(url: str, *, timeout_s: float = 20.0, **options: Any) -> OpenAIEngine:
    return OpenAIEngine(
        JsonClient(Address.parse(url), timeout_s=timeout_s, connect_s=0.2),
        engine_id="e",
        epoch=2,
        slots=8,
        precision="float32",
        vocab_size=VOCABULARY,
        **options,
    )


def play(
    behaviour: Behaviour, script: Callable[[OpenAIEngine], Awaitable[None]], **options: Any
) -> None:
    async def main(url: str) -> None:
        built = engine(url, **options)
        await script(built)
        await built.close()

    with serving(behaviour) as url:
        asyncio.run(main(url))


def test_a_turn_comes_back_with_ids_and_the_log_probs_of_what_was_sampled_from() -> None:
    async def script(engine: OpenAIEngine) -> None:
        said = await engine.generate(request("a", [1, 2, 3], 5, temperature=0.5))
        context = (1, 2, 3)
        for token, logp in zip(said.token_ids, said.logps, strict=True):
            table = log_softmax([z / 0.5 for z in logits(context, 3.0)])
            assert logp == pytest.approx(table[token], abs=1e-5)
            context = (*context, token)
        (span,) = said.spans
        assert (span.version, span.epoch, span.engine) == (7, 2, "e")

    play(Behaviour(), script, version=7)


def test_everything_a_server_could_default_to_is_asked_for() -> None:
    behaviour = Behaviour()

    async def script(engine: OpenAIEngine) -> None:
        await engine.generate(request("a", [1, 2], 2, stop_ids=(5,), top_p=0.9, top_k=4))

    play(behaviour, script, mode=BOTH)
    (sent,) = behaviour.requests
    assert sent["prompt"] == [1, 2]
    assert (sent["top_p"], sent["top_k"], sent["min_p"]) == (0.9, 4, 0.0)
    assert (sent["repetition_penalty"], sent["presence_penalty"]) == (1.0, 0.0)
    assert (sent["stop_token_ids"], sent["ignore_eos"]) == ([5], True)
    assert "Authorization" not in behaviour.headers[0]


def test_untruncated_top_k_is_said_as_every_server_understands_it() -> None:
    behaviour = Behaviour()

    async def script(engine: OpenAIEngine) -> None:
        await engine.generate(request("a", [1, 2], 2))

    play(behaviour, script, mode=BOTH)
    assert behaviour.requests[0]["top_k"] == -1


def test_llama_cpp_is_not_told_to_forbid_the_end_of_text() -> None:
    behaviour = Behaviour(owner="llamacpp")

    async def script(engine: OpenAIEngine) -> None:
        await engine.generate(request("a", [1, 2], 2))

    play(behaviour, script, mode=BOTH)
    assert (behaviour.requests[0]["ignore_eos"], behaviour.requests[0]["logprobs"]) == (False, 1)


def spoil(field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(reply: dict[str, Any]) -> None:
        reply["choices"][0][field] = value

    return change


def spoil_logps(value: Any, *, only_last: bool = True) -> Callable[[dict[str, Any]], None]:
    def change(reply: dict[str, Any]) -> None:
        listed = reply["choices"][0]["logprobs"]["token_logprobs"]
        listed[-1 if only_last else slice(None)] = value if only_last else [value] * len(listed)

    return change


def drop_ids(reply: dict[str, Any]) -> None:
    choice = reply["choices"][0]
    del choice["token_ids"]
    choice["logprobs"]["tokens"] = [" text"] * len(choice["logprobs"]["tokens"])


def append_eos(reply: dict[str, Any]) -> None:
    choice = reply["choices"][0]
    choice["finish_reason"] = "stop"
    choice["token_ids"][-1] = 2


def sample_past_a_stop(reply: dict[str, Any]) -> None:
    reply["choices"][0]["token_ids"][3] = 0


BAD_REPLIES = {
    "no-logprobs": (spoil("logprobs", None), "log-probs of the sampled ids"),
    "no-ids": (drop_ids, "return_token_ids"),
    "fewer-logprobs": (
        lambda reply: reply["choices"][0]["logprobs"]["token_logprobs"].pop(),
        "one per token id",
    ),
    "fewer-ids": (lambda reply: reply["choices"][0]["token_ids"].pop(), "one per token id"),
    "no-tokens": (
        lambda reply: reply["choices"][0].update(token_ids=[], logprobs={"token_logprobs": []}),
        "at least one",
    ),
    "nan": (spoil_logps(math.nan), "can be sampled"),
    "null": (spoil_logps(None), "numbers"),
    "text": (spoil_logps("-1.0"), "numbers"),
    "minus-infinity": (spoil_logps(-math.inf), "can be sampled"),
    "sentinel": (spoil_logps(-9999.0), "can be sampled"),
    "above-zero": (spoil_logps(0.3), "can be sampled"),
    "all-zero": (spoil_logps(0.0, only_last=False), "not all exactly 0"),
    "foreign-id": (spoil("token_ids", [0] * 19 + [VOCABULARY]), r"in \[0, 40\)"),
    "ids-as-text": (spoil("token_ids", ["1"] * 20), "sampled ids"),
    "another-prompt": (spoil("prompt_token_ids", [1, 1, 2, 3]), "ids that were sent"),
    "bos-put-before": (lambda reply: reply["usage"].update(prompt_tokens=4), "must be 3"),
    "appended-eos": (append_eos, "finish_reason"),
    "unheard-stop": (sample_past_a_stop, "first stop id"),
    "unfinished": (spoil("finish_reason", None), "finish_reason"),
    "cut-short": (
        lambda reply: reply["choices"][0].update(
            token_ids=reply["choices"][0]["token_ids"][:9],
            logprobs={"token_logprobs": [-1.0] * 9},
        ),
        "length at 20 tokens",
    ),
    "aborted": (spoil("finish_reason", "abort"), "finish_reason"),
    "no-choice": (lambda reply: reply["choices"].clear(), "one choice"),
    "two-choices": (lambda reply: reply["choices"].append({}), "one choice"),
    "an-error": (lambda reply: reply.pop("choices"), "one choice"),
}


@pytest.mark.parametrize("name", BAD_REPLIES)
def test_a_reply_that_cannot_be_trained_from_is_refused(name: str) -> None:
    change, rule = BAD_REPLIES[name]

    async def script(engine: OpenAIEngine) -> None:
        with pytest.raises(EngineFault, match=rule):
            # With key 3 the tokens sampled here contain no 0.
            await engine.generate(request("a", [1, 2, 3], 20, stop_ids=(0,), key=(3,)))
        # The session is free again.
        assert (await engine.info()).version == 0
        behaviour.change = lambda reply: None
        assert len((await engine.generate(request("a", [1, 2, 3], 1))).token_ids) == 1

    behaviour = Behaviour(change=change)
    play(behaviour, script, mode=BOTH)


@pytest.mark.parametrize(
    ("behaviour", "rule"),
    [
        (Behaviour(status=500), "status 200, got '500"),
        (Behaviour(status=404, raw=b"no such route"), "404 no such route"),
        (Behaviour(status=401), "401"),
        (Behaviour(raw=b"<html>"), "JSON"),
        (Behaviour(raw=b"[1]"), "one choice"),
        (Behaviour(raw=b"[" * 100_000), "JSON"),
        (Behaviour(raw=b""), "JSON"),
        (Behaviour(models=[]), "serving one model"),
        (Behaviour(models=[{"id": "a"}, {"id": "b"}]), r"got \['a', 'b'\]"),
    ],
    ids=["500", "404", "401", "html", "list", "deep", "empty", "no-model", "two-models"],
)
def test_a_server_that_answers_wrongly_is_a_fault(behaviour: Behaviour, rule: str) -> None:
    async def script(engine: OpenAIEngine) -> None:
        with pytest.raises(EngineFault, match=rule):
            await engine.generate(request("a", [1, 2, 3], 20))

    play(behaviour, script, mode=BOTH)


def test_the_model_named_behind_the_url_is_asked() -> None:
    behaviour = Behaviour(models=[{"id": "a"}, {"id": "b"}])

    async def main(url: str) -> None:
        built = engine(f"{url}/v1#b", mode=BOTH)
        await built.generate(request("a", [1], 2))
        await built.close()

    with serving(behaviour) as url:
        asyncio.run(main(url))
    assert behaviour.requests[0]["model"] == "b"


def test_a_hanging_server_is_a_fault_within_the_deadline() -> None:
    async def script(engine: OpenAIEngine) -> None:
        with pytest.raises(EngineFault, match=r"answered within 0\.3 s"):
            await engine.generate(request("a", [1, 2, 3], 20))

    play(Behaviour(hang=threading.Event()), script, timeout_s=0.3, mode=BOTH)


def test_a_request_is_never_sent_twice() -> None:
    behaviour = Behaviour(status=503)

    async def script(engine: OpenAIEngine) -> None:
        with pytest.raises(EngineFault, match="503"):
            await engine.generate(request("a", [1, 2, 3], 20))

    play(behaviour, script, mode=BOTH)
    assert len(behaviour.requests) == 1


def test_a_dead_server_is_a_fault() -> None:
    async def main(url: str) -> None:
        built = engine(url, mode=BOTH)
        with pytest.raises(EngineFault, match="a server that listens"):
            await built.generate(request("a", [1, 2, 3]))
        await built.close()

    with serving() as url:
        pass
    asyncio.run(main(url))


def test_raw_log_probs_are_found_and_refused_where_they_differ() -> None:
    async def script(engine: OpenAIEngine) -> None:
        assert await engine.connect() == LogprobMode(temperature=False, top_p=False, top_k=False)
        await engine.generate(request("a", [1, 2, 3]))
        for sampling in ({"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 3}):
            with pytest.raises(EngineFault, match=r"--logprobs-mode processed_logprobs.*raw"):
                await engine.generate(request("a", [1, 2, 3], **sampling))

    play(Behaviour(processed=False), script)


def test_processed_log_probs_are_found_despite_the_noise_of_bfloat16() -> None:
    async def script(engine: OpenAIEngine) -> None:
        assert await engine.connect() == BOTH

    play(Behaviour(noise=0.04), script)


def test_log_probs_that_know_the_temperature_only_are_refused_behind_a_nucleus() -> None:
    async def script(engine: OpenAIEngine) -> None:
        assert await engine.connect() == LogprobMode(temperature=True, top_p=False, top_k=False)
        await engine.generate(request("a", [1, 2, 3], temperature=0.5))
        with pytest.raises(EngineFault, match=r"top_p 0\.9"):
            await engine.generate(request("a", [1, 2, 3], top_p=0.9))

    play(Behaviour(processed_top_p=False), script)


@pytest.mark.parametrize(
    "behaviour", [Behaviour(spread=0.001), Behaviour(listed=False)], ids=["flat", "unlisted"]
)
def test_a_mode_that_cannot_be_told_is_refused(behaviour: Behaviour) -> None:
    async def script(engine: OpenAIEngine) -> None:
        with pytest.raises(EngineFault, match="measurable"):
            await engine.connect()

    play(behaviour, script)


def test_a_server_without_log_probs_is_refused_when_connecting() -> None:
    async def script(engine: OpenAIEngine) -> None:
        with pytest.raises(EngineFault, match="log-probs of the sampled ids"):
            await engine.connect()

    play(Behaviour(change=spoil("logprobs", None), spoil_probes=True), script)


def test_weights_cannot_be_pushed() -> None:
    async def script(engine: OpenAIEngine) -> None:
        with pytest.raises(EngineFault, match="takes weights"):
            await engine.load(MANIFEST)
        assert not (await engine.info()).loads

    play(Behaviour(), script)


def test_a_prompt_beyond_the_context_or_vocabulary_is_not_sent() -> None:
    behaviour = Behaviour()

    async def script(engine: OpenAIEngine) -> None:
        with pytest.raises(EngineFault, match="between 1 and 256 tokens"):
            await engine.generate(request("a", [1] * 250, 7))
        for prompt in ([], [VOCABULARY], [-1]):
            with pytest.raises(EngineFault, match="session a: prompt"):
                await engine.generate(request("a", prompt))
        with pytest.raises(EngineFault, match="forced_ids"):
            await engine.generate(request("a", [1], 1, forced=[1]))
        with pytest.raises(EngineFault, match="sampling"):
            await engine.generate(request("a", [1], temperature=0.0))

    play(behaviour, script, mode=BOTH)
    assert not behaviour.requests


def test_a_cancelled_caller_ends_the_request() -> None:
    async def script(engine: OpenAIEngine) -> None:
        task = asyncio.create_task(engine.generate(request("a", [1, 2, 3], 20)))
        while not behaviour.requests:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert behaviour.hang is not None
        behaviour.hang.set()
        assert (await engine.generate(request("a", [1], 2))).finish is FinishReason.LENGTH

    behaviour = Behaviour(hang=threading.Event())
    play(behaviour, script, mode=BOTH)


def test_scoring_gives_the_log_probs_of_a_prompt() -> None:
    async def script(engine: OpenAIEngine) -> None:
        found = await engine.score([1, 2, 3, 4])
        expected = [
            log_softmax(logits((1, 2, 3, 4)[:i], 3.0))[(1, 2, 3, 4)[i]] for i in range(1, 4)
        ]
        assert found == pytest.approx(expected)

    play(Behaviour(), script, mode=BOTH)


def test_a_server_that_cannot_score_is_refused() -> None:
    async def script(engine: OpenAIEngine) -> None:
        with pytest.raises(EngineFault, match="prompt_logprobs"):
            await engine.score([1, 2, 3, 4])

    play(Behaviour(change=spoil("prompt_logprobs", None), spoil_probes=True), script, mode=BOTH)


def built(tmp_path: Path, **options: Any) -> OpenAIEngine:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    settings = {"kind": "openai", "url": "http://127.0.0.1:9"} | options
    paced = settings.pop("paced", False)
    return build(
        EngineConfig(**settings),
        model=tmp_path,
        engine_id="e",
        epoch=0,
        fetch=lambda manifest: {},
        digest=lambda tensors: "",
        paced=paced,
    )


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"url": ""}, "engine.url"),
        ({"url": "http://example.org"}, "engine.url"),
        ({"url": "ftp://127.0.0.1"}, "engine.url"),
        ({"kv_mode": "keep"}, "engine.kv_mode"),
        ({"float32_head": True}, "engine.float32_head"),
        ({"prefix_cache": False}, "engine.prefix_cache"),
        ({"paced": True}, "engine.kind"),
    ],
)
def test_what_cannot_be_had_from_a_foreign_server_is_refused(
    tmp_path: Path, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        built(tmp_path, **options)
    assert caught.value.field == field


def test_plain_http_elsewhere_and_the_token_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUEUP_ENGINE_PLAIN_HTTP", "gpu-box")
    built(tmp_path, url="http://gpu-box:8000")
    monkeypatch.setenv("TRUEUP_ENGINE_TOKEN", "secret")
    behaviour = Behaviour(status=403)

    async def main(url: str) -> None:
        engine = built(tmp_path, url=url)
        with pytest.raises(EngineFault) as caught:
            await engine.generate(request("a", [1, 2, 3], 20))
        assert "secret" not in str(caught.value.as_dict())
        await engine.close()

    with serving(behaviour) as url:
        asyncio.run(main(url))
    assert behaviour.headers[-1]["Authorization"] == "Bearer secret"


def test_the_vocabulary_of_the_model_directory_is_needed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        build(
            EngineConfig(kind="openai", url="http://127.0.0.1:9"),
            model=tmp_path,
            engine_id="e",
            epoch=0,
            fetch=lambda manifest: {},
            digest=lambda tensors: "",
            paced=False,
        )
