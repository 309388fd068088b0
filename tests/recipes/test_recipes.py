import pytest

from trueup import config
from trueup.config import Config
from trueup.errors import ConfigError
from trueup.recipes.table import DEFAULT, names, text


@pytest.mark.parametrize("name", names())
def test_every_recipe_loads_and_says_what_to_expect(name: str) -> None:
    toml = text(name)
    config.load(toml, source=name)
    comment = [line for line in toml.splitlines() if line.startswith("#")]
    assert toml.startswith("# ")
    assert any("Expect:" in line for line in comment)


def test_the_default_recipe_is_the_default_configuration() -> None:
    assert config.load(text(DEFAULT)) == Config()


def differences(name: str) -> dict[str, object]:
    ours, base = config.load(text(name)).model_dump(), Config().model_dump()
    return {
        f"{section}.{key}": value
        for section, table in ours.items()
        if isinstance(table, dict)
        for key, value in table.items()
        if value != base[section][key]
    }


def test_a_comparison_changes_what_it_studies_and_nothing_else() -> None:
    assert differences("tiny-sync") == {"schedule.staleness": 0}
    assert differences("tiny-stale") == {
        "schedule.staleness": 0,
        "sync.delay": 8,
        "correction.preset": "none",
    }
    assert differences("tiny-uncached") == {
        "train.steps": 10,
        "environment.verdict_cache": False,
    }


def test_an_unknown_recipe_names_its_nearest_neighbour() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown recipe 'tiny-asink'; did you mean 'tiny-async'"
    ):
        text("tiny-asink")
    with pytest.raises(ConfigError, match=f"recipes: {', '.join(names())}"):
        text("../../etc/passwd")
