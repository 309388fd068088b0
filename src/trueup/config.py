"""The configuration of a run: one model per section, one level of meaning per key.

A run is a named, complete configuration (`recipes/*.toml`) plus dotted overrides. Everything that
can be known to be wrong is refused here, before anything starts, with the field, the rule and the
value; an unknown key names its nearest neighbour.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trueup.errors import ConfigError


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused, no silent conversions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


Beta = Annotated[float, Field(ge=0, lt=1)]


TINY_AGENT = "tiny-agent"
"""`model.path` of the policy that is built on first use."""


class ModelConfig(Section):
    """Which policy is trained."""

    path: str = TINY_AGENT
    """`tiny-agent` (built and fine-tuned on first use), `smollm2-135m` (converted on first use) or
    a Hugging Face directory."""


CLIPS = {"ppo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 5.0)}
"""Published (ε_lo, ε_hi) of each loss; an ε_lo of 1 is no lower bound."""


def _published(given: Mapping[str, Any], side: int) -> float:
    return CLIPS[given.get("loss", "ppo")][side]


class TrainConfig(Section):
    """The optimiser's side of a step."""

    steps: int = Field(40, ge=1)
    """Step batches to train."""
    groups_per_step: int = Field(8, ge=1)
    """Groups in a step batch."""
    samples_per_group: int = Field(8, ge=1)
    """Episodes of one task, the group of the group-relative advantage."""
    minibatches: int = Field(2, ge=1)
    """Optimiser steps per step batch."""
    microbatch_tokens: int = Field(8192, ge=1)
    """Padded tokens that one forward holds; nothing but memory depends on it."""
    optimizer: Literal["adam", "adamw"] = "adam"
    lr: float = Field(5e-4, ge=0)
    """0 trains nothing: every diagnostic must then be stationary."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    """Largest gradient norm."""
    loss: Literal["ppo", "gspo", "cispo"] = "ppo"
    """Clipped ratio per token; per sequence; as a detached weight (docs/concepts/losses.md)."""
    mode: Literal["decoupled", "bypass"] = "decoupled"
    """Weight π_old/μ and clip π_θ/π_old; or clip π_θ/μ, and no weight."""
    clip_low: float = Field(default_factory=lambda given: _published(given, 0), gt=0, le=1)
    """ε_lo of the clipped ratio; if not given, what is published for the loss."""
    clip_high: float = Field(default_factory=lambda given: _published(given, 1), gt=0)
    """ε_hi of the clipped ratio; if not given, what is published for the loss."""
    dual_clip: float = Field(0.0, ge=0)
    """c: with A < 0 a ratio counts at most as c (published: 3); 0: off."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    """Mean over tokens (DAPO); over episodes of their token means (GRPO); over episodes of their
    sums, divided by a constant (Dr. GRPO)."""
    sequence_constant: float = Field(24.0, gt=0)
    """Divisor of `sequence_sum`: the most tokens that an episode may have."""
    kl_beta: float = Field(0.0, ge=0)
    """Weight of the KL penalty (k3) against the policy that the run started from; 0: off."""
    lr_ess: bool = False
    """Scale each step's learning rate by √(ESS/B), of the applied weights over episodes."""
    advantage: Literal["group", "group_std", "leave_one_out"] = "group_std"
    """Reward − group mean; divided by the group's standard deviation; leave-one-out baseline."""
    zero_variance: Literal["drop", "keep", "refill"] = "drop"
    """Groups without contrast: no gradient and counted; kept; or refunded and sampled anew."""
    deterministic: bool = False
    """Run the controller on a logical clock: two runs give identical weights and ledgers."""
    threads: int = Field(1, ge=1)
    """Torch threads of the trainer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the layers; weights, optimiser and logits are float32 whatever it is."""
    fused: bool = True
    """Take log π_old from the update's own forward where that gives the same result: one optimiser
    step per step batch, and a correction that does not need the whole of it."""

    @model_validator(mode="after")
    def _dual_clip_bounds_more_than_the_clip(self) -> TrainConfig:
        least = 1 + self.clip_high
        if self.dual_clip and self.loss == "cispo":
            raise ConfigError(
                field="train.dual_clip",
                rule="0 with train.loss=cispo, which bounds every ratio",
                value=self.dual_clip,
            )
        if self.dual_clip and self.dual_clip <= least:
            raise ConfigError(
                field="train.dual_clip",
                rule=f"0 or above 1 + train.clip_high ({least:g})",
                value=self.dual_clip,
            )
        return self


class EvalConfig(Section):
    """Held-out evaluation."""

    every: int = Field(0, ge=0)
    """Steps between evaluations during the run; 0: only base and end."""
    samples: int = Field(8, ge=0)
    """Episodes per held-out task; 0: no evaluation."""
    temperature: float = Field(1.0, gt=0)


class ScheduleConfig(Section):
    """The rules of admission, consumption and sync (formulas in docs/concepts/staleness.md)."""

    staleness: int = Field(2, ge=0)
    """η: step batches that generation may run ahead; 0 is synchronous training."""
    consume: Literal["accept", "drop", "requeue", "mask", "wait"] = "wait"
    """What happens to tokens beyond the bound when they are consumed."""
    sync_mode: Literal["interrupt", "drain"] = "interrupt"
    """Swap weights in the middle of episodes, or wait until the engine is empty."""
    sync_every: int = Field(1, ge=1)
    """Updates per sync."""
    timeout_s: float = Field(0.0, ge=0)
    """Deadline of a group; at it the group closes with its survivors. 0: none."""
    min_survivors: int = Field(2, ge=1)
    """Fewest finished members with which a group may close."""
    retries: int = Field(2, ge=0)
    """Further attempts of a member whose infrastructure failed."""


class SyncConfig(Section):
    """How weights travel."""

    delay: int = Field(0, ge=0)
    """Versions an engine stays behind from the start (a study of staleness)."""
    transport: Literal["shared_memory", "filesystem"] = "shared_memory"


class EngineConfig(Section):
    """What samples."""

    kind: Literal["embedded", "vllm", "openai", "transformers"] = "embedded"
    """`embedded` needs nothing else; the others are described in docs/engines.md."""
    count: int = Field(1, ge=1)
    """Engine processes."""
    slots: int = Field(16, ge=1)
    """Episodes in flight per engine; more are only worth it where tools keep them waiting."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    quantize: Literal[
        "none",
        "fp8",
        "fp8_row",
        "fp8_block",
        "mxfp8",
        "fp8_weight",
        "fp8_cast_all",
        "int8",
        "int8_weight",
        "fp4",
        "int4",
    ] = "none"
    """Grid of weights and activations of the rollout forward (docs/engines.md); every version is
    quantised when it is loaded."""
    kv_mode: Literal["recompute", "keep"] = "recompute"
    """What happens to cached keys and values of running episodes when weights change: they are
    computed again, or kept, and the tokens behind them have a hybrid policy."""
    prefix_cache: bool = True
    """Reuse keys and values of earlier turns, and of the prompt that the samples of a group
    share."""
    float32_head: bool = False
    """Compute the logits in float32 whatever `dtype` is."""
    temperature: float = Field(1.0, gt=0)
    max_tokens: int = Field(8, ge=1)
    """Most tokens sampled in one turn."""
    threads: int = Field(1, ge=1)
    """Torch threads per engine."""
    url: str = ""
    """Where a server listens that was started elsewhere (`openai`, `vllm`); empty: start one."""

    @property
    def precision(self) -> str:
        """Arithmetic of the forward, as spans name it."""
        return self.dtype if self.quantize == "none" else f"{self.dtype}+{self.quantize}"


class CorrectionConfig(Section):
    """How the gap between behaviour and target is corrected."""

    preset: str = "tis"
    """A method of docs/corrections. Without a correction a run must say so: `none`."""
    params: dict[str, float] = Field(default_factory=dict)
    """Overrides of the preset's constants."""
    filters: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Filters of other presets that come before the weights, in order, each with overrides of its
    constants: `correction.filters.geo={}`, `correction.filters.geo.low=.99`."""
    on: Literal["total", "staleness", "engine"] = "total"
    """The part of the gap that is corrected; a part needs `attribution.share = 1`."""
    normalize: bool = False
    """Divide the weights by their mean over the kept tokens of the step batch."""
    denominator: Literal["all", "kept"] = "all"
    """Which tokens the loss denominator Z counts."""
    gate: Literal["current", "previous"] = "current"
    """Where a method decides one number from the step batch (α of `ais`, the bound of `m2po`, the
    mean of `normalize`, `off_below`): from this one, or from the one before, which needs no second
    pass (docs/design/fusion.md)."""
    off_below: float = Field(0.0, ge=0)
    """Mean |d| in nats, the engine's measured floor, up to which a step batch without a stale token
    is not corrected; 0: never off."""


class AttributionConfig(Section):
    """How much of the gap is split by cause."""

    share: float = Field(1.0, ge=0, le=1)
    """Share of episodes scored under the version that sampled them."""
    label_test: float = Field(0.25, ge=0, le=1)
    """Share of these scored under the version before as well: are version labels true?"""
    repeat: float = Field(0.05, ge=0, le=1)
    """Share of episodes scored twice, in other micro-batches: the noise of the scorer."""


class ProbeConfig(Section):
    """What every engine decodes after a load, for the trainer to score."""

    every: int = Field(1, ge=0)
    """Loads of an engine per probe, from its first one on; 0: never."""
    sequences: int = Field(6, ge=2)
    """Sequences of two turns; the scatter between them says what chance can do."""
    tokens: int = Field(6, ge=1)
    """Tokens sampled in each turn."""
    on_alarm: Literal["warn", "stop"] = "warn"
    """Record an alarm and go on, or stop the run."""


class LatencyConfig(Section):
    """Injected tool latency, log-normal."""

    median_s: float = Field(0.0, ge=0)
    sigma: float = Field(0.0, ge=0)


class EnvironmentConfig(Section):
    """What the agent acts in."""

    kind: Literal["arithmetic", "bugfix"] = "bugfix"
    level: int = Field(1, ge=1, le=4)
    """How hard the problems of `arithmetic` are (`environments/arithmetic_problems.py`)."""
    max_turns: int = Field(3, ge=1)
    workers: int = Field(4, ge=1)
    """Sandboxes alive at once."""
    deadline_s: float = Field(10.0, gt=0)
    """Wall time one sandboxed execution may take."""
    latency: LatencyConfig = LatencyConfig()
    verdict_cache: bool = True
    """Grade equal programs once; every use is counted."""


class SandboxConfig(Section):
    """What isolates model-written code."""

    kind: Literal["auto", "bwrap", "none"] = "auto"
    """`auto` takes the strongest that works and refuses if none does; `none` is never a default."""


class CheckpointConfig(Section):
    """What a run can be resumed from."""

    every: int = Field(10, ge=1)
    keep: int = Field(2, ge=1)


class RuntimeConfig(Section):
    """Where the parts run."""

    kind: Literal["local"] = "local"


class Config(Section):
    """A complete run."""

    seed: int = Field(0, ge=0, lt=2**63)
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    sync: SyncConfig = SyncConfig()
    engine: EngineConfig = EngineConfig()
    correction: CorrectionConfig = CorrectionConfig()
    attribution: AttributionConfig = AttributionConfig()
    probe: ProbeConfig = ProbeConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    sandbox: SandboxConfig = SandboxConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _no_contradictions(self) -> Config:
        episodes = self.episodes_per_step
        if episodes % self.train.minibatches:
            raise ConfigError(
                field="train.minibatches",
                rule=f"a divisor of the {episodes} episodes of a step batch",
                value=self.train.minibatches,
            )
        if self.schedule.min_survivors > self.train.samples_per_group:
            raise ConfigError(
                field="schedule.min_survivors",
                rule=f"at most train.samples_per_group ({self.train.samples_per_group})",
                value=self.schedule.min_survivors,
            )
        self._check_cause()
        if self.eval.every and not self.eval.samples:
            raise ConfigError(
                field="eval.every",
                rule="0 where eval.samples is 0, which evaluates nothing",
                value=self.eval.every,
            )
        return self

    def _check_cause(self) -> None:
        """A part of the gap needs the log-prob of every token under its own version."""
        if self.correction.on == "total":
            return
        if self.attribution.share < 1:
            rule = "total where attribution.share is below 1: every token must be scored"
        elif self.schedule.consume in ("accept", "mask"):
            rule = f"total where schedule.consume is {self.schedule.consume}: a token beyond the "
            rule += "bound has a version that is no longer kept"
        else:
            return
        raise ConfigError(field="correction.on", rule=rule, value=self.correction.on)

    @property
    def episodes_per_step(self) -> int:
        """B: episodes of one step batch."""
        return self.train.groups_per_step * self.train.samples_per_group

    @property
    def published_dtype(self) -> Literal["float32", "bfloat16"]:
        """What weights are rounded to before they travel: what the engine would round them to.

        A grid is fitted to the weights as they are trained, but vLLM holds them in its own dtype.
        """
        rounds = self.engine.quantize == "none" or self.engine.kind == "vllm"
        return self.engine.dtype if rounds else "float32"

    @property
    def staleness_bound(self) -> int:
        """Largest lag of a token that admission intends: η + delay + (sync_every − 1)."""
        return self.schedule.staleness + self.sync.delay + self.schedule.sync_every - 1


def load(text: str = "", overrides: Sequence[str] = (), *, source: str = "configuration") -> Config:
    """Parse TOML, apply `key.path=value` overrides, validate.

    Args:
        text: TOML.
        overrides: Dotted assignments; values are read as TOML, bare words as strings.
        source: What the text is called in errors.

    Raises:
        ConfigError: Syntax, unknown key (with the nearest name), wrong type, out of range,
            contradiction.
    """
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not TOML: {error}", field=source, rule="TOML") from None
    for item in overrides:
        key, value = _parse_override(item)
        _assign(tree, key, value)
    return from_dict(tree)


def from_dict(tree: Mapping[str, Any]) -> Config:
    """Validate a nested mapping; see `load` for the errors."""
    _refuse_unknown(tree, Config, prefix="")
    try:
        # JSON, for its rules of strictness: a list is a tuple, an integer is a float. It has no
        # dates, which are TOML's: as text they are what an override model.path=2026-01-01 means.
        return Config.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            raise cause from None
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(field=field, rule=_rule(first), value=first.get("input")) from None


def as_toml(config: Config) -> str:
    """The whole configuration as TOML; `load` gives the same configuration back."""
    lines: list[str] = []
    _toml_table(config.model_dump(mode="json"), (), lines)
    return "\n".join(lines).strip() + "\n"


def fields() -> dict[str, tuple[str, str, Any]]:
    """Every key as {dotted name: (type, meaning, default)}, in order."""
    found: dict[str, tuple[str, str, Any]] = {}
    _collect(Config, "", found)
    return found


def cache_dir() -> Path:
    """Where models built on first use are kept: `$TRUEUP_CACHE`, else `~/.cache/trueup`."""
    return Path(os.environ.get("TRUEUP_CACHE") or Path.home() / ".cache" / "trueup")


def _collect(model: type[BaseModel], prefix: str, found: dict[str, tuple[str, str, Any]]) -> None:
    schema = model.model_json_schema()["properties"]
    defaults: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            _collect(info.annotation, f"{prefix}{name}.", found)
            continue
        entry = schema[name]
        kind = " | ".join(map(str, entry["enum"])) if "enum" in entry else _type_name(entry)
        default = info.get_default(call_default_factory=True, validated_data=defaults)
        defaults[name] = default
        found[prefix + name] = (kind, info.description or "", default)


def _type_name(entry: Mapping[str, Any]) -> str:
    if "const" in entry:
        return str(entry["const"])
    bounds = {
        "minimum": "≥",
        "exclusiveMinimum": ">",
        "maximum": "≤",
        "exclusiveMaximum": "<",
    }
    limits = " ".join(f"{sign} {entry[key]:g}" for key, sign in bounds.items() if key in entry)
    return f"{entry.get('type', 'value')} {limits}".strip()


def _parse_override(item: str) -> tuple[str, Any]:
    key, equals, raw = item.partition("=")
    if not equals or not key.strip():
        raise ConfigError(field="override", rule="of the form key.path=value", value=item)
    try:
        parsed = tomllib.loads(f"x = {raw.strip()}")
    except tomllib.TOMLDecodeError:
        return key.strip(), raw.strip()
    if len(parsed) > 1:
        raise ConfigError(field="override", rule="one assignment", value=item)
    return key.strip(), parsed["x"]


def _assign(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(field=key, rule="a key inside a section", value=value)
    tree[name] = value


def _refuse_unknown(tree: Mapping[str, Any], model: type[BaseModel], *, prefix: str) -> None:
    for key, value in tree.items():
        name = prefix + key
        if key not in model.model_fields:
            near = _nearest(key, model, prefix)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(
                f"unknown key {name!r}{hint}", field=name, rule="a known key", value=value
            )
        inner = model.model_fields[key].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            if not isinstance(value, Mapping):
                raise ConfigError(field=name, rule="a section", value=value)
            _refuse_unknown(value, inner, prefix=f"{name}.")


def _nearest(key: str, model: type[BaseModel], prefix: str) -> str:
    """The known name that was probably meant: of the same section, else of any; or nothing."""
    if near := difflib.get_close_matches(key, list(model.model_fields), n=1):
        return prefix + near[0]
    by_last_part = {name.rpartition(".")[2]: name for name in fields()}
    near = difflib.get_close_matches(key, list(by_last_part), n=1)
    return by_last_part[near[0]] if near else ""


def _rule(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return "present"
    message = str(error["msg"])
    for prefix in ("Input should be ", "Value error, "):
        message = message.removeprefix(prefix)
    return message


def _toml_table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    plain = {k: v for k, v in table.items() if not isinstance(v, dict) or path[-1:] == ("params",)}
    nested = {k: v for k, v in table.items() if k not in plain}
    if path and (plain or not nested):
        lines.append(f"\n[{'.'.join(path)}]")
    lines.extend(f"{_toml_key(key)} = {_toml_value(value)}" for key, value in plain.items())
    for key, value in nested.items():
        _toml_table(value, (*path, key), lines)


def _toml_key(key: str) -> str:
    bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if bare else _toml_value(key)


def _toml_value(value: Any) -> str:
    """JSON is TOML for our values, but for characters beyond 16 bits and DEL, escaped otherwise."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
