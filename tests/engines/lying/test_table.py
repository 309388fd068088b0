import asyncio

import pytest

from support.embedded import Publisher, request, tiny
from trueup.config import EngineConfig
from trueup.engines.lying import FAULTS, Forge, plant, planting
from trueup.engines.scripted import Reply, ScriptedEngine
from trueup.engines.table import ENGINES
from trueup.errors import ConfigError, TransportFault
from trueup.models.load import save_model
from trueup.sync.digest import digest


def test_every_fault_says_what_it_is_what_is_seen_and_how_it_is_planted():
    for fault in FAULTS.values():
        assert fault.meaning
        assert fault.seen
        assert fault.planted
        EngineConfig.model_validate(dict(fault.demands))


def test_no_configuration_names_a_liar():
    assert not [target for target in ENGINES.values() if "lying" in target]


@pytest.mark.parametrize(
    "choose", [planting, lambda name, seed: plant(SCRIPTED, name, seed=seed, forge=FORGE)]
)
def test_an_unknown_fault_is_refused_with_the_known_ones(choose):
    with pytest.raises(ConfigError, match="stale_head"):
        choose("stale_hat", seed=0)


def test_an_engine_of_the_table_is_built_as_the_fault_demands(tmp_path):
    model = tiny()
    save_model(model, tmp_path / "model")
    publisher = Publisher()
    engine = planting("noop_quantisation", seed=0)(
        EngineConfig(slots=2, quantize="int8"),
        model=tmp_path / "model",
        engine_id="e",
        epoch=0,
        fetch=publisher.transport.fetch,
        digest=digest,
        paced=False,
    )

    async def main() -> None:
        await engine.load(publisher.publish(model))
        said = await engine.generate(request("a", [1, 2]))
        assert said.spans[0].precision == "float32+int8"
        await engine.close()

    asyncio.run(main())


def test_a_forged_version_is_gone_once_it_is_loaded():
    publisher = Publisher()
    published = publisher.publish(tiny())
    forge = Forge(publisher.transport.fetch, digest)
    tensors = forge(published)
    head = {"lm_head.weight": tensors["lm_head.weight"] * 2}
    with forge.offer(published, tensors, head) as forged:
        read = forge(forged)
        assert digest(read) == forged.digest != published.digest
        assert read["lm_head.weight"].equal(tensors["lm_head.weight"] * 2)
    with pytest.raises(TransportFault, match="on offer"):
        forge(forged)


def test_a_forge_passes_on_what_its_source_says_and_verifies_it():
    model = tiny()
    publisher = Publisher()
    published = publisher.publish(model)
    forge = Forge(lambda _: {"x": model.lm_head.weight.detach()}, digest)
    with pytest.raises(TransportFault, match="digest"):
        forge(published)


SCRIPTED = ScriptedEngine(lambda asked: Reply(token_ids=(1,), logps=(-1.0,)))
FORGE = Forge(lambda manifest: {}, digest)
