import inspect

import pytest

from trueup.engines.base import Engine
from trueup.engines.table import ENGINES, engine_class
from trueup.errors import ConfigError


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_every_line_names_a_class_with_the_methods_of_the_port(name: str) -> None:
    found = engine_class(name)
    for verb in ("info", "generate", "release", "load", "activity", "close"):
        ours, port = getattr(found, verb), getattr(Engine, verb)
        assert inspect.iscoroutinefunction(ours)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(port).parameters)


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"embedded.*scripted"):
        engine_class("vllm-nightly")
