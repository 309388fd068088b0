"""What the probe after a load finds on a real vLLM server; `make test-vllm` runs it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import support.vllm
from support.embedded import VOCABULARY, request
from support.vllm import engine, model, published, server
from trueup import config
from trueup.diagnostics.labels import labels_refuted, regress
from trueup.engines.base import Engine
from trueup.engines.lying import Forge, LyingEngine, plant
from trueup.engines.lying.engine import retold
from trueup.engines.vllm.engine import VllmEngine
from trueup.engines.vllm.server import Server
from trueup.models.logprobs import action_logprobs
from trueup.models.packed import PackedBatch
from trueup.models.quantization.fake import quantized_logprobs
from trueup.models.quantization.schemes import scheme
from trueup.training.inspector import Inspector, measure
from trueup.training.messages import ProbeReport
from trueup.training.probe import ProbeSet, decode
from trueup.types import Completion, GenerateRequest, LoadReceipt, WeightManifest

FORGE = Forge(lambda manifest: {}, lambda tensors: "")
"""Alters nothing: vLLM's workers read the weights by themselves."""


@pytest.fixture(autouse=True)
def asked_for() -> None:
    support.vllm.skip_without_vllm()


class Trainer:
    """Who knows the weights of versions 1, 2, ... and judges an engine's loads."""

    def __init__(self, root: Path, *policies: Any, temperature: float = 1.0) -> None:
        settings = config.load("", [f"engine.temperature={temperature}"])
        # Prompts as long as in a model of 2048 positions fill a cache block of 128.
        self.probes = ProbeSet.of(settings, vocabulary=VOCABULARY, positions=2048)
        self.policies, self.temperature = policies, temperature
        self.manifests = published(root, policies)
        self.inspector = Inspector(self.score, self.on_grid, trained="float32", learns=True)
        for manifest in self.manifests:
            self.inspector.published(manifest)
        self.loads = 0

    @torch.no_grad()
    def score(self, batch: PackedBatch, version: int) -> Tensor:
        return action_logprobs(self.policies[version - 1], batch, temperature=self.temperature).logp

    def on_grid(self, batch: PackedBatch, name: str) -> Tensor:
        policy = self.policies[self.loads - 1]
        return quantized_logprobs(policy, batch, scheme(name), temperature=self.temperature)

    async def load(self, engine: Engine, manifest: WeightManifest) -> ProbeReport:
        return await self.judge(engine, await engine.load(manifest))

    async def judge(self, engine: Engine, receipt: LoadReceipt) -> ProbeReport:
        self.loads += 1
        episodes = await decode(engine, self.probes, name=f"probe-{self.loads}")
        return self.inspector(receipt, episodes, newest=receipt.version)


def moved(policy: Any, size: float) -> Any:
    """The policy after a step of so much, relative to its weights."""
    torch.manual_seed(5)
    other = model(0)
    other.load_state_dict(policy.state_dict())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(size * parameter.std() * torch.randn_like(parameter))
    return other


def play(running: Server, script: Callable[[VllmEngine], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        adapter = engine(running, **options)
        try:
            await script(adapter)
        finally:
            await adapter.close()

    asyncio.run(main())


def names(report: ProbeReport) -> set[str]:
    return {name for name, _ in report.alarms}


def test_an_honest_server_raises_no_alarm_and_decodes_behind_its_cache(tmp_path: Path) -> None:
    async def script(adapter: VllmEngine) -> None:
        trainer = Trainer(tmp_path, *(model(seed) for seed in range(1, 6)))
        for manifest in trainer.manifests:
            report = await trainer.load(adapter, manifest)
            assert names(report) == set()
            assert report.cached > 0.7
            assert report.mean is not None
            assert report.mean < 2e-5

    play(server(slots=8), script)


def test_a_stale_tied_head_is_found_at_the_first_update(tmp_path: Path) -> None:
    async def script(adapter: VllmEngine) -> None:
        trainer = Trainer(tmp_path, model(1), moved(model(1), 0.05))
        assert names(await trainer.load(adapter, trainer.manifests[0])) == set()
        await adapter._client.call("trueup_repacks", "off")
        try:
            assert names(await trainer.load(adapter, trainer.manifests[1])) == {"probe"}
        finally:
            await adapter._client.call("trueup_repacks", "on")

    play(server(slots=8), script)


def test_a_surviving_prefix_cache_is_found_at_the_first_update(tmp_path: Path) -> None:
    async def script(adapter: VllmEngine) -> None:
        trainer = Trainer(tmp_path, model(1), moved(model(1), 0.05))
        assert names(await trainer.load(adapter, trainer.manifests[0])) == set()
        old_salt = adapter._salt
        # A running turn holds its blocks, so the cache cannot be reset.
        beside = asyncio.create_task(adapter.generate(request("c", [1, 2, 3], 250)))
        await asyncio.sleep(0.2)
        receipt = await adapter.load(trainer.manifests[1])
        adapter._salt = old_salt
        assert not beside.done()
        assert names(await trainer.judge(adapter, receipt)) == {"probe"}
        await beside

    play(server(slots=8), script, kv_mode="keep")


def test_raw_log_probs_are_found_at_the_first_load(tmp_path: Path) -> None:
    async def script(adapter: VllmEngine) -> None:
        trainer = Trainer(tmp_path, model(1), temperature=0.7)
        raw = plant(adapter, "raw_logprobs", seed=0, forge=FORGE)
        assert names(await trainer.load(raw, trainer.manifests[0])) == {"probe"}
        honest = Trainer(tmp_path / "honest", model(1), model(2), temperature=0.7)
        assert names(await honest.load(adapter, honest.manifests[1])) == set()

    (tmp_path / "honest").mkdir()
    play(server(slots=8), script)


class Claiming(LyingEngine):
    """Says that it computes in INT8, as an option that is accepted and does nothing would."""

    async def generate(self, asked: GenerateRequest) -> Completion:
        said = await super().generate(asked)
        return retold(said, lambda span: replace(span, precision="float32+int8"))


def test_a_quantisation_that_is_claimed_and_not_done_is_found(tmp_path: Path) -> None:
    """vLLM 0.32 accepts `int8_per_channel_weight_only` and leaves dense layers as they are."""

    async def script(adapter: VllmEngine) -> None:
        trainer = Trainer(tmp_path, model(1))
        lying = Claiming(adapter, seed=0, forge=FORGE)
        assert names(await trainer.load(lying, trainer.manifests[0])) == {"grid"}

    play(server(slots=8), script)


def test_a_real_quantisation_is_believed(tmp_path: Path) -> None:
    async def script(adapter: VllmEngine) -> None:
        trainer = Trainer(tmp_path, model(1), moved(model(1), 0.05))
        for manifest in trainer.manifests:
            assert names(await trainer.load(adapter, manifest)) == set()

    running = server(slots=4, dtype="bfloat16", quantize="int8")
    play(running, script, precision="bfloat16+int8", quantize="int8")


def test_an_update_that_never_arrived_is_found_by_digest_and_by_what_tokens_follow(
    tmp_path: Path,
) -> None:
    """A step so small that the mean is below every alarm."""
    elsewhere = tmp_path / "old"
    elsewhere.mkdir()

    async def script(adapter: VllmEngine) -> None:
        trainer = Trainer(tmp_path, model(1), moved(model(1), 1e-5))
        old = published(elsewhere, [model(1), model(1)])
        await trainer.load(adapter, old[0])
        receipt = await adapter.load(old[1])
        episodes = await decode(adapter, trainer.probes, name="again")
        report = trainer.inspector(receipt, episodes, newest=2)
        assert names(report) == {"digest"}
        found = measure(episodes, trainer.score, newest=2)
        assert found.batch is not None
        own, before = found.own.double(), trainer.score(found.batch, 1).double()
        fit = regress(before - own, found.behaviour.double() - own, found.sequence, 6)
        slope, error = float(fit[2]), float(fit[3])
        assert labels_refuted(slope, error)
        assert slope == pytest.approx(1, abs=max(0.2, 4 * error))

    play(server(slots=8), script)
