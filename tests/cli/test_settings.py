import json

import pytest

from trueup import config
from trueup.config import Config
from trueup.recipes import table


def test_show_prints_a_configuration_that_loads_again(trueup):
    answer = trueup("config", "show", "tiny-sync", "train.steps=7")
    shown = config.load(answer.out)
    assert shown == config.load(table.text("tiny-sync"), ["train.steps=7"])
    assert trueup("config", "show", "train.steps=7", "tiny-sync").out == answer.out
    assert config.from_dict(trueup("config", "show", "--json").json) == Config()


def test_a_file_stands_for_a_recipe(trueup, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[train]\nsteps = 3\n")
    shown = config.load(trueup("config", "show", "--config", str(file), "seed=4").out)
    assert (shown.train.steps, shown.seed) == (3, 4)


def test_every_key_is_explained_with_type_default_and_meaning(trueup):
    keys = trueup("config", "explain", "--json").json["keys"]
    assert keys.keys() == config.fields().keys()
    assert keys["schedule.staleness"] == {
        "type": "integer ≥ 0",
        "default": 2,
        "meaning": config.fields()["schedule.staleness"][1],
    }


def test_a_key_is_explained_in_two_lines(trueup):
    first, second = trueup("config", "explain", "train.clip_low").out.splitlines()
    assert first == "train.clip_low = 0.2  (number > 0 ≤ 1)"
    assert second.strip().startswith("ε_lo of the clipped ratio; if not given, what is published")


def test_a_section_lists_its_keys_and_no_others(trueup):
    keys = trueup("config", "explain", "checkpoint", "--json").json["keys"]
    assert list(keys) == ["checkpoint.every", "checkpoint.keep"]
    assert "environment.latency.sigma" in trueup("config", "explain", "environment").out


def test_a_preset_is_explained_by_formula_source_and_price(trueup):
    out = trueup("config", "explain", "correction.preset=tis").out
    assert "w = min(ρ, cap)" in out
    assert "source: Yao et al. 2025" in out
    assert "price: nothing with 1 optimiser step" in out


def test_constants_are_explained_for_the_presets_that_have_them(trueup):
    found = trueup("config", "explain", "correction.params.cap", "--json").json["explanation"]
    named = [line.partition(":")[0] for line in found.splitlines()]
    assert named == ["tis", "seq-tis", "turn-tis", "minpro", "ais", "ais-lag", "ais-episode"]


def test_a_filter_is_explained_by_its_preset(trueup):
    out = trueup("config", "explain", "correction.filters.geo.low").out
    assert "correction.filters = {}" in out
    assert "geo: w = 1 if low <= ρ_geo <= high" in out
    every = trueup("config", "explain", "correction.filters").out
    assert "geo: " in every
    assert "tis: " not in every


def test_a_preset_is_explained_under_the_names_it_has_elsewhere(trueup):
    out = trueup("config", "explain", "correction.preset=icepop").out
    assert "mis: w = ρ if low <= ρ <= high" in out
    assert "high = 5: largest ratio kept, inclusive (>= 1)" in out
    assert "also called icepop, token_mask" in out


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "schedule.stalenes",
            "unknown key 'schedule.stalenes'; did you mean 'schedule.staleness'?",
        ),
        ("sched", "unknown key 'sched'"),
        ("train.steps=0", "train.steps must be greater than or equal to 1, got 0"),
        ("correction.preset=tiss", "correction.preset must be"),
        ("schedule.staleness.x", "schedule.staleness must be"),
    ],
)
def test_what_cannot_be_explained_is_refused(trueup, key, message):
    answer = trueup("config", "explain", key)
    assert answer.code == 2
    assert message in answer.err


def test_the_schema_is_that_of_the_configuration(trueup):
    assert json.loads(trueup("config", "schema").out) == Config.model_json_schema()
    assert trueup("config", "schema", "--json").json == Config.model_json_schema()


def test_recipes_are_listed_with_their_first_line(trueup):
    found = trueup("recipes", "--json").json
    assert found["default"] == table.DEFAULT
    assert tuple(found["recipes"]) == table.names()
    for name, line in zip(table.names(), trueup("recipes").out.splitlines(), strict=True):
        assert line.split(maxsplit=1) == [name, found["recipes"][name]]
