import inspect

import pytest

from trueup.engines.base import Engine
from trueup.engines.batching.engine import BatchingEngine
from trueup.engines.embedded.engine import EmbeddedEngine
from trueup.engines.openai.engine import OpenAIEngine
from trueup.engines.scripted import ScriptedEngine
from trueup.engines.table import ENGINES, Build, factory
from trueup.errors import ConfigError


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_every_line_names_a_factory_with_the_signature_of_the_table(name: str) -> None:
    ours = list(inspect.signature(factory(name)).parameters)
    assert ours == list(inspect.signature(Build.__call__).parameters)[1:]


@pytest.mark.parametrize("engine", [BatchingEngine, EmbeddedEngine, OpenAIEngine, ScriptedEngine])
def test_an_engine_has_the_methods_of_the_port(engine: type[Engine]) -> None:
    for verb in ("info", "generate", "release", "load", "activity", "close"):
        ours, port = getattr(engine, verb), getattr(Engine, verb)
        assert inspect.iscoroutinefunction(ours)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(port).parameters)


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="embedded"):
        factory("vllm-nightly")
