"""The mismatch of an engine and a trainer with identical weights, measured on sampled tokens.

One sample serves all: the engine's tokens are scored by the trainer's full forward in float32 and
bfloat16, alone and in batches, and decoded again as they are by engines of other settings. What the
statistics say is that of `diagnostics`; nothing is computed twice.

Legend: N sampled tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trueup.config import EngineConfig
from trueup.diagnosis.rollouts import Rollouts, sample
from trueup.diagnosis.scorer import Weights
from trueup.diagnosis.subject import Subject
from trueup.diagnostics.attribution import Attribution, attribution
from trueup.diagnostics.calibration import calibration
from trueup.diagnostics.effective_size import ess_ratio
from trueup.diagnostics.mismatch import Bin, mismatch
from trueup.engines.base import Engine
from trueup.errors import ConfigError, EngineFault
from trueup.gap import PolicyGap
from trueup.models.load import load_state
from trueup.models.logprobs import action_logprobs
from trueup.models.packed import PackedBatch
from trueup.models.quantization.schemes import SCHEMES
from trueup.types import GenerateRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCHES = (1, 10, 30)
"""Completions that share a forward."""
ROWS = 30
OTHER_ROWS = 10
"""Completions, the first ones, that are decoded in other arithmetic."""
_PROMPT_ROOM = 1 << 20
"""Padded positions of one forward: a batch is never split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """How far two sets of log-probs of the same tokens are apart."""

    group: str
    """What the comparison is about: `trainer`, `batch`, `decode`, `precision`."""
    name: str
    tokens: int
    abs_mean: float
    """Mean |d| in nats; median, p99 and max of |d| likewise."""
    abs_median: float
    abs_p99: float
    abs_max: float
    sum_max: float
    """Largest |Σ d| of a completion in nats."""
    ess: float
    """ESS ratio of the token ratios."""
    z: float | None
    """Calibration: (mean ratio − 1) / standard error; None where the behaviour is not what sampled
    the tokens, and the mean ratio need not be 1."""

    @classmethod
    def of(cls, group: str, name: str, gap: PolicyGap) -> Line:
        """Measure the gap of two scorers, or of one and the engine."""
        found = mismatch(gap)
        return cls(
            group=group,
            name=name,
            tokens=found.tokens,
            abs_mean=found.abs_mean,
            abs_median=found.abs_median,
            abs_p99=found.abs_p99,
            abs_max=found.abs_max,
            sum_max=found.episode_sum_max,
            ess=float(ess_ratio(gap.log_ratio[gap.valid])),
            z=calibration(gap).z if group == "trainer" else None,
        )


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Everything measured."""

    model: str
    engine: str
    """Kind, or URL."""
    precision: str
    tokens: int
    completions: int
    lines: tuple[Line, ...]
    bins: tuple[Bin, ...]
    """Mean |d| of the float32 trainer against the engine, by behaviour probability."""
    split: Attribution
    """Staleness and engine parts of the gap to the model."""
    gap: PolicyGap
    """Float32 trainer against the engine."""
    curves: dict[str, list[float]]
    """|d| of every token, ascending, by comparison."""
    notes: tuple[str, ...]
    """What could not be measured, and why."""


async def measure(
    subject: Subject,
    config: EngineConfig,
    *,
    tokens: int = 960,
    served: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Measure an engine against the trainer.

    Args:
        subject: Model and prompts.
        config: The engine.
        tokens: To sample, in 30 completions.
        served: Directory of the weights that the engine serves, if not those of the model: then
            the gap has a part that is staleness.
        tell: Says how far it is.

    Raises:
        ConfigError: The engine cannot do what is asked for.
        EngineFault: It failed.
        DataError: Its completions, log-probs and spans do not fit.
    """
    rows = min(ROWS, tokens)
    tell(f"sampling {tokens} tokens")
    engine = subject.open(config)
    own = subject.publish(config, subject.weights(config, served))
    notes: list[str] = []
    try:
        if config.kind != "openai":
            await engine.load(own.manifest)
            subject.retire(config, own)
        info = await engine.info()
        rollouts = await sample(engine, subject.requests(rows, -(-tokens // rows)))
        tell("scoring with the trainer's forward")
        scores = _trainer(subject.model, rollouts, None if served is None else own.weights)
        said = rollouts.said
        tell("decoding the same tokens in other batches")
        if info.forces:
            for size in BATCHES:
                scores[f"decode, batch {size}"] = await _forced(engine, rollouts, size)
        else:
            notes.append("this engine decodes no given tokens: its own batches cannot be compared")
    finally:
        await engine.close()
    others: dict[str, Tensor] = {}
    if config.kind == "embedded":
        few = rollouts.select(range(min(OTHER_ROWS, rows)))
        others, more = await _others(subject, config, few, served, tell)
        notes += more
    else:
        notes.append("other arithmetics are those of the embedded engine: trueup measure MODEL")
    version = scores["fp32 trainer, batch 1"]
    target = scores.get("fp32 model, batch 1", version)
    gap = replace(rollouts.gap(target), logp_version=version.float())
    return Measurement(
        model=subject.name,
        engine=config.url or config.kind,
        precision=info.precision,
        tokens=len(said),
        completions=rows,
        lines=tuple(_lines(rollouts, scores, others)),
        bins=tuple(mismatch(rollouts.gap(version)).breakdowns["probability"]),
        split=attribution(gap),
        gap=rollouts.gap(version),
        curves=_curves(said, scores),
        notes=tuple(notes),
    )


def _trainer(
    model: PreTrainedModel, rollouts: Rollouts, served: Weights | None
) -> dict[str, Tensor]:
    """Log-probs [N] of full forwards in two precisions and batch sizes."""
    found: dict[str, Tensor] = {}
    narrow: Any = copy.deepcopy(model)
    wide: Any = copy.deepcopy(model)
    if served is not None:
        found["fp32 model, batch 1"] = _scored(model, rollouts, 1)
        load_state(wide, {name: tensor.float() for name, tensor in served.items()})
        load_state(narrow, {name: tensor.float() for name, tensor in served.items()})
    narrow.to(torch.bfloat16)
    for name, scorer in (("bf16", narrow), ("fp32", wide)):
        for size in BATCHES:
            found[f"{name} trainer, batch {size}"] = _scored(scorer, rollouts, size)
    return found


def trainer_logp(model: PreTrainedModel, rollouts: Rollouts) -> Tensor:
    """[N] log-probs of a full forward of each completion by itself, in the model's arithmetic."""
    return _scored(model, rollouts, 1)


@torch.no_grad()
def _scored(model: PreTrainedModel, rollouts: Rollouts, size: int) -> Tensor:
    """[N] log-probs, `size` completions in each forward."""
    packed: PackedBatch = rollouts.packed
    parts = []
    for rows in torch.split(torch.arange(len(rollouts.completions)), size):
        batch = packed.select(rows)
        parts.append(action_logprobs(model, batch, microbatch_tokens=_PROMPT_ROOM).logp)
    return torch.cat(parts).double()


async def _forced(engine: Engine, rollouts: Rollouts, size: int) -> Tensor:
    """[N] log-probs of the same tokens, `size` completions decoded at once."""
    parts = []
    for start in range(0, len(rollouts.requests), size):
        pairs = zip(
            rollouts.requests[start : start + size],
            rollouts.completions[start : start + size],
            strict=True,
        )
        again = await sample(engine, [given(r, c.token_ids, f"{size}") for r, c in pairs])
        parts.append(again.said)
    return torch.cat(parts)


def given(request: GenerateRequest, ids: Any, name: str) -> GenerateRequest:
    """A request to decode exactly these tokens, in a session of its own."""
    sampling = replace(request.sampling, max_tokens=len(ids), stop_ids=())
    return replace(request, session=f"{request.session}-{name}", sampling=sampling, forced_ids=ids)


async def _others(
    subject: Subject,
    config: EngineConfig,
    rollouts: Rollouts,
    served: Path | None,
    tell: Callable[[str], None],
) -> tuple[dict[str, Tensor], list[str]]:
    """Log-probs of embedded engines in other arithmetic, and what they cannot do."""
    found, notes = {}, []
    for name, other in arithmetics(config):
        tell(f"decoding the same tokens in {name}")
        try:
            found[name] = await decode(subject, other, rollouts, served=served)
        except (ConfigError, EngineFault) as error:
            notes.append(f"{name}: {error.message}")
    return found, notes


def arithmetics(config: EngineConfig) -> list[tuple[str, EngineConfig]]:
    """Other settings of an embedded engine, by the precision that spans would name."""
    settings: list[dict[str, object]] = [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "float32_head": True},
    ]
    settings += [{"dtype": config.dtype, "quantize": scheme} for scheme in SCHEMES]
    found = []
    for setting in settings:
        plain: dict[str, object] = {"quantize": "none", "float32_head": False}
        other = config.model_copy(update=plain | setting)
        head = ", float32 head" if other.float32_head else ""
        found.append((other.precision + head, other))
    return found


async def decode(
    subject: Subject, config: EngineConfig, rollouts: Rollouts, *, served: Path | None = None
) -> Tensor:
    """[N] log-probs that an engine of other settings gives to the same tokens.

    Raises:
        ConfigError: It cannot do what is asked for.
        EngineFault: It failed.
    """
    engine = subject.open(config)
    release = subject.publish(config, subject.weights(config, served))
    try:
        await engine.load(release.manifest)
        subject.retire(config, release)
        return await _forced(engine, rollouts, ROWS)
    finally:
        await engine.close()


def _lines(
    rollouts: Rollouts, scores: dict[str, Tensor], others: dict[str, Tensor]
) -> Sequence[Line]:
    few = rollouts.select(range(min(OTHER_ROWS, len(rollouts.completions))))

    def line(group: str, name: str, target: Tensor, behaviour: Tensor) -> Line:
        here = rollouts if len(behaviour) == len(rollouts.said) else few
        return Line.of(group, name, here.gap(target[: len(behaviour)], behaviour))

    said = rollouts.said
    trainer = [
        line("trainer", f"{name} vs engine", scores[name], said)
        for name in scores
        if "trainer" in name
    ]
    batch = [
        line(
            "batch",
            f"{p} trainer: batch 1 vs {b}",
            scores[f"{p} trainer, batch 1"],
            scores[f"{p} trainer, batch {b}"],
        )
        for p in ("bf16", "fp32")
        for b in BATCHES[1:]
    ]
    decoded = [
        line(
            "decode",
            f"decode: batch 1 vs {b}",
            scores["decode, batch 1"],
            scores[f"decode, batch {b}"],
        )
        for b in BATCHES[1:]
        if "decode, batch 1" in scores
    ]
    fp32 = scores["fp32 trainer, batch 1"]
    precision = [line("precision", f"fp32 trainer vs {n}", fp32, others[n]) for n in others]
    return [*trainer, *batch, *decoded, *precision]


def _curves(said: Tensor, scores: dict[str, Tensor]) -> dict[str, list[float]]:
    """|d| of every token, ascending: trainers against the engine, and an arithmetic with itself."""
    pairs = {
        "bf16 trainer vs engine": (scores["bf16 trainer, batch 1"], said),
        "fp32 trainer vs engine": (scores["fp32 trainer, batch 1"], said),
        "bf16 trainer: batch 1 vs 30": (
            scores["bf16 trainer, batch 1"],
            scores["bf16 trainer, batch 30"],
        ),
    }
    if "decode, batch 1" in scores:
        pairs["decode: batch 1 vs 30"] = (scores["decode, batch 1"], scores["decode, batch 30"])
    return {name: (a - b).abs().sort().values.tolist() for name, (a, b) in pairs.items()}
