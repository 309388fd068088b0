import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.config import Config, as_toml, cache_dir, fields, from_dict, load
from trueup.errors import ConfigError


def refusal(*overrides: str, text: str = "") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(text, overrides)
    return caught.value


def test_nothing_given_is_the_default_configuration() -> None:
    assert load() == Config()


# Unknown keys


@pytest.mark.parametrize(
    ("override", "unknown", "nearest"),
    [
        ("schedule.stalenes=1", "schedule.stalenes", "schedule.staleness"),
        ("train.group_per_step=4", "train.group_per_step", "train.groups_per_step"),
        (
            "environment.latency.median=1",
            "environment.latency.median",
            "environment.latency.median_s",
        ),
        ("trian.lr=1", "trian", "train"),
        ("lr=1", "lr", "train.lr"),
        ("staleness=1", "staleness", "schedule.staleness"),
        ("Seed=1", "Seed", "seed"),
    ],
)
def test_an_unknown_key_names_its_nearest_neighbour(
    override: str, unknown: str, nearest: str
) -> None:
    error = refusal(override)
    assert error.message == f"unknown key {unknown!r}; did you mean {nearest!r}?"
    assert (error.field, error.rule) == (unknown, "a known key")


def test_a_key_like_no_other_suggests_nothing() -> None:
    assert refusal("train.qqqqqq=1").message == "unknown key 'train.qqqqqq'"
    assert refusal("train..lr=1").message == "unknown key 'train.'"


# Types, ranges


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=one", "seed must be a valid integer, got 'one'"),
        ("seed=1.0", "seed must be a valid integer, got 1.0"),
        ("seed=true", "seed must be a valid integer, got True"),
        ('seed="1"', "seed must be a valid integer, got '1'"),
        ("seed=2026-01-01", "seed must be a valid integer, got '2026-01-01'"),
        ("seed=", "seed must be a valid integer, got ''"),
        ("train.lr=fast", "train.lr must be a valid number, got 'fast'"),
        ("train.lr.x=1", "train.lr must be a valid number, got {'x': 1}"),
        ("train.deterministic=1", "train.deterministic must be a valid boolean, got 1"),
        ("train.betas=[0.9]", "train.betas.1 must be present, got [0.9]"),
        ("train.betas=0.9", "train.betas must be a valid array, got 0.9"),
        ("model.path=3", "model.path must be a valid string, got 3"),
        ("correction.params=3", "correction.params must be an object, got 3"),
        ("correction.params.cap=x", "correction.params.cap must be a valid number, got 'x'"),
        ("train=3", "train must be a section, got 3"),
        ("environment.latency=3", "environment.latency must be a section, got 3"),
    ],
)
def test_a_wrong_type_is_refused_and_never_converted(override: str, message: str) -> None:
    assert refusal(override).message == message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=-1", "seed must be greater than or equal to 0, got -1"),
        (f"seed={2**63}", f"seed must be less than {2**63}, got {2**63}"),
        ("train.steps=0", "train.steps must be greater than or equal to 1, got 0"),
        ("train.lr=-1e-9", "train.lr must be greater than or equal to 0, got -1e-09"),
        ("train.lr=nan", "train.lr must be a finite number, got nan"),
        ("train.lr=inf", "train.lr must be a finite number, got inf"),
        ("train.betas=[0.9, 1.0]", "train.betas.1 must be less than 1, got 1.0"),
        ("train.grad_clip=0", "train.grad_clip must be greater than 0, got 0"),
        ("train.clip_low=1.5", "train.clip_low must be less than or equal to 1, got 1.5"),
        ("schedule.staleness=-1", "schedule.staleness must be greater than or equal to 0, got -1"),
        ("attribution.share=1.1", "attribution.share must be less than or equal to 1, got 1.1"),
        ("correction.params.cap=inf", "correction.params.cap must be a finite number, got inf"),
        (
            "schedule.consume=dropp",
            "schedule.consume must be 'accept', 'drop', 'requeue', 'mask' or 'wait', got 'dropp'",
        ),
        (
            "sync.transport=inprocess",
            "sync.transport must be 'shared_memory' or 'filesystem', got 'inprocess'",
        ),
    ],
)
def test_a_value_out_of_range_is_refused(override: str, message: str) -> None:
    assert refusal(override).message == message


# Contradictions


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.groups_per_step=3", "train.samples_per_group=5", "train.minibatches=2"],
            "train.minibatches must be a divisor of the 15 episodes of a step batch, got 2",
        ),
        (
            ["schedule.min_survivors=9"],
            "schedule.min_survivors must be at most train.samples_per_group (8), got 9",
        ),
        (
            ["eval.every=5", "eval.samples=0"],
            "eval.every must be 0 where eval.samples is 0, which evaluates nothing, got 5",
        ),
        (
            ["correction.on=engine", "attribution.share=0.5"],
            "correction.on must be total where attribution.share is below 1: every token must be "
            "scored, got 'engine'",
        ),
        (
            ["correction.on=staleness", "schedule.consume=accept"],
            "correction.on must be total where schedule.consume is accept: a token beyond the "
            "bound has a version that is no longer kept, got 'staleness'",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(overrides: list[str], message: str) -> None:
    assert refusal(*overrides).message == message


# Overrides


def test_overrides_are_read_as_toml_and_bare_words_as_strings() -> None:
    config = load(
        "[train]\nsteps = 7\n",
        [
            "train.lr = 1e-3",
            "train.betas=[0.8, 0.95]",
            "schedule.consume=drop",
            'schedule.sync_mode="drain"',
            "train.deterministic=true",
            "correction.params.cap=3",
            "model.path=/models/a=b#c",
        ],
    )
    assert config.train.steps == 7
    assert config.train.lr == 1e-3
    assert config.train.betas == (0.8, 0.95)
    assert config.schedule.consume == "drop"
    assert config.schedule.sync_mode == "drain"
    assert config.train.deterministic is True
    assert config.correction.params == {"cap": 3.0}
    assert config.model.path == "/models/a=b#c"


def test_the_last_override_of_a_key_wins_over_earlier_ones_and_the_text() -> None:
    assert load("seed = 1", ["seed=2", "seed=3"]).seed == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "override must be of the form key.path=value, got 'seed'"),
        ("=3", "override must be of the form key.path=value, got '=3'"),
        ("seed=1\nlr=2", "override must be one assignment, got 'seed=1\\nlr=2'"),
    ],
)
def test_what_is_no_assignment_is_refused(override: str, message: str) -> None:
    assert refusal(override).message == message


def test_an_override_inside_what_is_no_section_is_refused() -> None:
    error = refusal("train.lr.x=3", text="[train]\nlr = 1.0")
    assert error.message == "train.lr.x must be a key inside a section, got 3"


def test_text_that_is_not_toml_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"^my\.toml is not TOML: "):
        load("seed = ", source="my.toml")


# Writing


def test_the_whole_configuration_survives_toml() -> None:
    config = load(
        overrides=["seed=7", "correction.params.cap=2.5", "environment.latency.sigma=1.5"]
    )
    text = as_toml(config)
    assert load(text) == config
    assert "cap = 2.5" in text


@settings(max_examples=200, deadline=None)
@given(
    path=st.text(st.characters(exclude_categories=["Cs"])),
    name=st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    number=st.floats(allow_nan=False, allow_infinity=False),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_value_survives_toml(path: str, name: str, number: float, seed: int) -> None:
    config = from_dict(
        {"seed": seed, "model": {"path": path}, "correction": {"params": {name: number}}}
    )
    assert load(as_toml(config)) == config


def test_the_written_configuration_is_complete() -> None:
    written = tomllib.loads(as_toml(Config()))

    def leaves(tree: dict, prefix: str = "") -> set[str]:
        found = set()
        for key, value in tree.items():
            nested = isinstance(value, dict) and key not in ("params", "filters")
            found |= leaves(value, f"{prefix}{key}.") if nested else {prefix + key}
        return found

    assert leaves(written) == set(fields())


# Reading


def test_every_key_is_listed_with_type_meaning_and_default() -> None:
    listed = fields()
    assert listed["schedule.staleness"] == (
        "integer ≥ 0",
        "η: step batches that generation may run ahead; 0 is synchronous training.",
        2,
    )
    assert listed["sync.transport"][0] == "shared_memory | filesystem"
    assert listed["correction.params"][2] == {}


def test_a_configuration_cannot_be_changed_after_it_was_checked() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().seed = 3  # type: ignore[misc]


def test_derived_sizes_follow_their_definitions() -> None:
    config = load(
        overrides=[
            "train.groups_per_step=3",
            "train.samples_per_group=4",
            "schedule.staleness=2",
            "sync.delay=5",
            "schedule.sync_every=3",
        ]
    )
    assert config.episodes_per_step == 12
    assert config.staleness_bound == 2 + 5 + 2


@pytest.mark.parametrize(
    ("overrides", "published"),
    [
        ([], "float32"),
        (["engine.dtype=bfloat16"], "bfloat16"),
        (["engine.dtype=bfloat16", "engine.quantize=int8"], "float32"),
        (["engine.dtype=bfloat16", "engine.quantize=int8", "engine.kind=vllm"], "bfloat16"),
        (["engine.dtype=float32", "engine.quantize=fp8_row"], "float32"),
    ],
)
def test_weights_travel_in_what_the_engine_holds_them_in(
    overrides: list[str], published: str
) -> None:
    assert load("", overrides).published_dtype == published


def test_the_cache_lies_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("TRUEUP_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("TRUEUP_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "trueup"
