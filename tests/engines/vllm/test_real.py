"""The adapter and the worker extension on a real vLLM server; `make test-vllm` runs them.

The traps that the extension is there for are shown to be there without it.
"""

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import support.vllm
from support.embedded import logps, reference_logps, request
from support.vllm import engine, model, published, server
from trueup.config import EngineConfig
from trueup.engines.vllm.build import start
from trueup.engines.vllm.client import HttpClient
from trueup.engines.vllm.engine import VllmEngine, VllmOptions
from trueup.engines.vllm.server import Server, interpreter
from trueup.errors import EngineFault, TransportFault
from trueup.models.load import load_model, save_model
from trueup.types import Completion, KVState, WeightManifest

FLOOR = 2e-5
"""Mean |d| in float32 against one full forward, in nats; measured: 5e-7."""
LONG = [(7 * i) % 40 for i in range(140)]
"""Longer than a cache block (128)."""

Script = Callable[[VllmEngine], Awaitable[None]]


@pytest.fixture(autouse=True)
def asked_for() -> None:
    support.vllm.skip_without_vllm()


@pytest.fixture
def tiny_server() -> Server:
    return server(slots=8)


def play(running: Server, script: Script, **options: Any) -> None:
    async def main() -> None:
        adapter = engine(running, **options)
        try:
            await script(adapter)
        finally:
            await adapter.close()

    asyncio.run(main())


def versions(root: Path, *seeds: int) -> list[WeightManifest]:
    return published(root, [model(seed) for seed in seeds])


def distance(policy: Any, prompt: Sequence[int], said: Completion, at: float = 1.0) -> Tensor:
    """[n] |d| against a full forward of the policy."""
    return (logps(said) - reference_logps(policy, prompt, said.token_ids, at)).abs()


async def until_decoding(adapter: VllmEngine) -> None:
    await asyncio.sleep(0)
    await adapter.generate(request("beside", [7], 4))


def test_log_probs_are_those_of_the_distribution_sampled_from(
    tiny_server: Server, tmp_path: Path
) -> None:
    async def script(adapter: VllmEngine) -> None:
        await adapter.load(versions(tmp_path, 1)[0])
        policy = model(1)
        warm = await adapter.generate(request("a", [1, 2, 3], 60, temperature=0.6))
        assert float(distance(policy, [1, 2, 3], warm, 0.6).mean()) < FLOOR
        # At another temperature they are far away: the check above can fail.
        assert float(distance(policy, [1, 2, 3], warm).mean()) > 0.05
        top = await adapter.generate(request("b", [1, 2, 3], 60, top_k=1))
        assert list(top.logps) == [0.0] * 60

    play(tiny_server, script)


def test_forced_ids_outside_the_support_have_no_probability(
    tiny_server: Server, tmp_path: Path
) -> None:
    async def script(adapter: VllmEngine) -> None:
        await adapter.load(versions(tmp_path, 1)[0])
        table = torch.tensor(list((await adapter.generate(request("a", [1, 2, 3], 1))).logps))
        assert torch.isfinite(table).all()
        best = (await adapter.generate(request("b", [1, 2, 3], 1, top_k=1))).token_ids[0]
        other = (best + 1) % 40
        forced = await adapter.generate(request("c", [1, 2, 3], 1, top_k=1, forced=[other]))
        assert list(forced.logps) == [-torch.inf]

    play(tiny_server, script)


def test_without_the_repack_a_tied_head_answers_with_the_old_weights(
    tiny_server: Server, tmp_path: Path
) -> None:
    async def script(adapter: VllmEngine) -> None:
        one, two, three = published(tmp_path, [model(1), model(2), model(2)])
        await adapter.load(one)
        await adapter._client.call("trueup_repacks", "off")
        try:
            await adapter.load(two)
            stale = await adapter.generate(request("a", [1, 2, 3], 60))
        finally:
            await adapter._client.call("trueup_repacks", "on")
        assert stale.spans[0].version == 2
        assert float(distance(model(2), [1, 2, 3], stale).mean()) > 0.05
        await adapter.load(three)
        fresh = await adapter.generate(request("a", [1, 2, 3], 60))
        assert float(distance(model(2), [1, 2, 3], fresh).mean()) < FLOOR

    play(tiny_server, script)


@pytest.mark.parametrize("kv_mode", ["recompute", "keep"])
def test_an_update_in_the_middle_of_turns_keeps_every_turn_and_every_label_true(
    tiny_server: Server, tmp_path: Path, kv_mode: str
) -> None:
    async def script(adapter: VllmEngine) -> None:
        one, two = versions(tmp_path, 1, 2)
        await adapter.load(one)
        turns = [
            asyncio.create_task(adapter.generate(request(f"t{i}", [1, 2, 3 + i], 250, key=(i,))))
            for i in range(6)
        ]
        await until_decoding(adapter)
        receipt = await adapter.load(two)
        # Bounded generously, for machines that do much else beside.
        assert receipt.pause_s < 5
        for i, said in enumerate(await asyncio.gather(*turns)):
            assert len(said.token_ids) == 250
            old, new = said.spans
            assert (old.version, new.version) == (1, 2)
            prompt = [1, 2, 3 + i]
            before = distance(model(1), prompt, said)[: old.stop]
            after = distance(model(2), prompt, said)[old.stop :]
            assert float(before.mean()) < FLOOR
            if kv_mode == "recompute":
                assert new.kv is KVState.RECOMPUTED
                assert float(after.mean()) < FLOOR
            else:
                assert (new.kv, new.context_versions) == (KVState.KEPT, (1, 2))
                # A hybrid: no forward of version 2 alone gives these log-probs.
                assert float(after.mean()) > 20 * FLOOR

    play(tiny_server, script, kv_mode=kv_mode)


def test_a_cached_prefix_of_old_weights_is_never_found_though_it_survives(
    tiny_server: Server, tmp_path: Path
) -> None:
    async def script(adapter: VllmEngine) -> None:
        one, two = versions(tmp_path, 1, 2)
        await adapter.load(one)
        await adapter.generate(request("a", LONG, 4))
        again = await adapter.generate(request("b", LONG, 4))
        assert again.tokens_cached == 128
        old_salt = adapter._salt
        # A running turn holds its blocks, so the cache cannot be reset.
        beside = asyncio.create_task(adapter.generate(request("c", [1, 2, 3], 250)))
        await until_decoding(adapter)
        await adapter.load(two)
        said = await adapter.generate(request("d", LONG, 40))
        assert said.tokens_cached == 0
        assert float(distance(model(2), LONG, said).mean()) < FLOOR
        # With the salt of the old version vLLM does hand out the old keys and values.
        adapter._salt = old_salt
        lied_to = await adapter.generate(request("e", LONG, 40))
        assert not beside.done()
        assert lied_to.tokens_cached == 128
        assert float(distance(model(2), LONG, lied_to).mean()) > 20 * FLOOR
        await beside

    play(tiny_server, script, kv_mode="keep")


def test_a_torn_version_is_refused_and_the_old_one_goes_on(
    tiny_server: Server, tmp_path: Path
) -> None:
    async def script(adapter: VllmEngine) -> None:
        one, two = versions(tmp_path, 1, 2)
        await adapter.load(one)
        turn = asyncio.create_task(adapter.generate(request("a", [1, 2, 3], 250)))
        await until_decoding(adapter)
        path = Path(two.location) / "weights.safetensors"
        torn = bytearray(path.read_bytes())
        torn[-3] ^= 1
        path.write_bytes(torn)
        with pytest.raises(TransportFault, match="of digest"):
            await adapter.load(two)
        said = await turn
        assert [span.version for span in said.spans] == [1]
        assert float(distance(model(1), [1, 2, 3], said).mean()) < FLOOR

    play(tiny_server, script)


@pytest.mark.parametrize(
    ("quantize", "least", "most"),
    # Layers of 64 of a random model; of float32 the mean |d| is 5e-7.
    [("int8", 1e-4, 0.1), ("fp8_row", 1e-3, 0.3)],
)
def test_quantised_rollouts_differ_and_follow_updates(
    tmp_path: Path, quantize: Any, least: float, most: float
) -> None:
    running = server(slots=4, dtype="bfloat16", quantize=quantize)

    async def script(adapter: VllmEngine) -> None:
        for seed, manifest in zip((1, 2), versions(tmp_path, 1, 2), strict=True):
            await adapter.load(manifest)
            said = await adapter.generate(request("a", [1, 2, 3], 120))
            assert said.spans[0].precision == f"bfloat16+{quantize}"
            assert least < float(distance(model(seed), [1, 2, 3], said).mean()) < most

    quantised = "int8" if quantize == "int8" else "none"
    play(running, script, precision=f"bfloat16+{quantize}", quantize=quantised)


def test_an_engine_that_hangs_is_noticed_and_all_of_it_dies_with_its_owner(
    tmp_path: Path,
) -> None:
    save_model(model(), tmp_path / "model")
    running = start(EngineConfig(kind="vllm", slots=4), tmp_path / "model")

    async def main() -> None:
        client = HttpClient("http://vllm", socket=str(running.socket), call_s=8.0)
        options = VllmOptions(engine_id="e", epoch=0, precision="float32")
        adapter = VllmEngine(client, options, watch_s=0.2)
        await adapter.load(versions(tmp_path / "run", 1)[0])
        turn = asyncio.create_task(adapter.generate(request("a", [1, 2, 3], 250)))
        await until_decoding(adapter)
        for pid in group(running.pid) - {running.pid}:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineFault, match="answered within 8 s"):
            await turn
        with pytest.raises(EngineFault, match="answered within 8 s"):
            await adapter.generate(request("b", [1], 2))
        await adapter.close()

    try:
        asyncio.run(main())
        assert len(group(running.pid)) >= 3
        # As when this process dies.
        assert running._process.stdin is not None
        running._process.stdin.close()
        until = time.monotonic() + 20
        while group(running.pid) and time.monotonic() < until:
            time.sleep(0.1)
        assert not group(running.pid)
    finally:
        running.kill()


def group(leader: int) -> set[int]:
    """Living processes of a group."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            state, _, pgid = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(pgid) == leader and state != "Z":
            found.add(int(entry.name))
    return found


def test_the_same_adapter_works_without_a_server(tmp_path: Path) -> None:
    save_model(model(), tmp_path / "model")
    manifests = versions(tmp_path / "run", 1, 2)
    with tempfile.TemporaryDirectory() as importable:
        import trueup

        (Path(importable) / "trueup").symlink_to(Path(trueup.__file__).parent)
        ran = subprocess.run(
            [
                str(interpreter()),
                str(Path(__file__).with_name("in_process_script.py")),
                str(tmp_path / "model"),
                *(json.dumps(asdict(manifest)) for manifest in manifests),
            ],
            env={
                **os.environ,
                "PYTHONPATH": importable,
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "TORCH_COMPILE_DISABLE": "1",
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert ran.returncode == 0, ran.stderr[-3000:]
    # vLLM logs to stdout too.
    (said,) = (line for line in ran.stdout.splitlines() if line.startswith("[{"))
    found = json.loads(said)
    for seed, turn, manifest in zip((1, 2), found, manifests, strict=True):
        assert turn["versions"] == [manifest.version]
        assert turn["digest"] == manifest.digest
        expected = reference_logps(model(seed), [1, 2, 3], turn["ids"])
        got = torch.tensor(turn["logps"], dtype=torch.float64)
        assert float((got - expected).abs().mean()) < FLOOR


def test_a_real_model_is_pushed_under_load_within_a_second(tmp_path: Path) -> None:
    from trueup.models.catalog import find

    path = find("smollm2-135m")
    if path is None:
        pytest.skip("make models converts it")
    running = server(path, slots=16, dtype="bfloat16", threads=2)
    policy = load_model(path, dtype=torch.bfloat16)
    reference = load_model(path)
    first, second = published(tmp_path, [policy, policy])

    async def script(adapter: VllmEngine) -> None:
        await adapter.load(first)
        prompts = [[(97 * i + 11 * j) % 40000 + 20 for j in range(24)] for i in range(8)]
        turns = [
            asyncio.create_task(adapter.generate(request(f"t{i}", prompt, 48, key=(i,))))
            for i, prompt in enumerate(prompts)
        ]
        await until_decoding(adapter)
        receipt = await adapter.load(second)
        found = await asyncio.gather(*turns)
        assert [len(said.token_ids) for said in found] == [48] * 8
        assert {span.version for said in found for span in said.spans} == {1, 2}
        d = torch.cat(
            [distance(reference, p, said) for p, said in zip(prompts[:4], found, strict=False)]
        )
        # bfloat16 against float32: 0.034 on 4,096 tokens elsewhere; 192 here.
        assert 0.01 < float(d.mean()) < 0.08
        # Measured 0.5 s on idle cores.
        assert receipt.pause_s < 5

    play(running, script, precision="bfloat16")
