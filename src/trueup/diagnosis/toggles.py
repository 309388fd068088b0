"""What in an engine the gap depends on: one setting at a time, on the same tokens.

The engine decodes the same tokens again with one setting taken back to its plain form, and with all
of them. k3 and log ESS are against the float32 trainer. What one toggle takes away from the gap is
its Δ; that all together take away more or less than the sum is the interaction.

Legend: N tokens.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trueup.config import EngineConfig
from trueup.diagnosis.measure import given
from trueup.diagnosis.rollouts import Rollouts, sample
from trueup.diagnosis.subject import Subject
from trueup.diagnostics.effective_size import ess_ratio
from trueup.diagnostics.mismatch import mismatch
from trueup.engines.base import Engine
from trueup.types import GenerateRequest


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the same tokens are decoded."""

    config: EngineConfig
    together: int
    """Completions at once."""
    prefill: bool = False
    """Every token is the first one behind a prompt that was computed as a whole."""
    whole: bool = False
    """From the whole support, whatever was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a toggle does."""

    name: str
    k3: float
    """KL(μ‖π) in nats with this toggle off."""
    log_ess: float
    """Log of the token ESS ratio with this toggle off."""
    delta_k3: float
    """What turning it off takes away."""
    delta_log_ess: float
    """What turning it off adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toggles:
    """All toggles of an engine."""

    tokens: int
    k3: float
    """With everything as the engine is."""
    log_ess: float
    one_off: tuple[Effect, ...]
    all_off: Effect
    interaction_k3: float
    """Δ of all of them minus the sum of each."""
    interaction_log_ess: float


def switches(config: EngineConfig, rollouts: Rollouts) -> dict[str, dict[str, object]]:
    """Toggle -> what `Setting` gets when it is off; only those that are on."""
    found: dict[str, dict[str, object]] = {}
    if config.quantize != "none":
        found[f"quantisation ({config.quantize})"] = {"quantize": "none"}
    if config.dtype != "float32":
        found[f"{config.dtype}"] = {"dtype": "float32"}
        if not config.float32_head:
            found["head in the engine's dtype"] = {"float32_head": True}
    if len(rollouts.completions) > 1:
        found[f"batch of {len(rollouts.completions)}"] = {"together": 1}
    found["decoding, not prefill"] = {"prefill": True}
    if config.prefix_cache:
        found["prefix cache"] = {"prefix_cache": False}
    if bool(rollouts.truncated.any()):
        found["truncated support"] = {"whole": True}
    return found


async def toggles(
    subject: Subject,
    config: EngineConfig,
    rollouts: Rollouts,
    target: Tensor,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> Toggles:
    """Turn off one thing at a time, then all.

    Args:
        subject: Builds the engines; they serve its model's weights.
        config: An engine that decodes given tokens.
        rollouts: The tokens.
        target: [N] log-probs of the float32 trainer.
        tell: Says how far it is.

    Raises:
        ConfigError: The engine cannot do one of them.
        EngineFault: An engine failed.
    """
    base = Setting(config=config, together=len(rollouts.completions))
    offs = switches(config, rollouts)
    tell("decoding as the engine is")
    here = _moments(rollouts, target, await _decoded(subject, base, rollouts))
    effects = []
    for name, off in offs.items():
        tell(f"decoding without: {name}")
        said = await _decoded(subject, _with(base, off), rollouts)
        effects.append(_effect(name, here, _moments(rollouts, target, said)))
    together: dict[str, object] = {}
    for off in offs.values():
        together |= off
    tell("decoding without any of them")
    said = await _decoded(subject, _with(base, together), rollouts)
    everything = _effect("all of them", here, _moments(rollouts, target, said))
    return Toggles(
        tokens=len(target),
        k3=here[0],
        log_ess=here[1],
        one_off=tuple(effects),
        all_off=everything,
        interaction_k3=everything.delta_k3 - sum(e.delta_k3 for e in effects),
        interaction_log_ess=everything.delta_log_ess - sum(e.delta_log_ess for e in effects),
    )


def _with(base: Setting, off: dict[str, object]) -> Setting:
    own = {name: off[name] for name in ("together", "prefill", "whole") if name in off}
    config = base.config.model_copy(update={n: v for n, v in off.items() if n not in own})
    return replace(base, config=config, **own)  # type: ignore[arg-type]


def _moments(rollouts: Rollouts, target: Tensor, said: Tensor) -> tuple[float, float]:
    """k3 and log ESS of the target against these log-probs, where they are finite."""
    gap = rollouts.gap(target, said)
    return mismatch(gap).k3, math.log(max(float(ess_ratio(gap.log_ratio[gap.valid])), 1e-300))


def _effect(name: str, here: tuple[float, float], off: tuple[float, float]) -> Effect:
    return Effect(
        name=name,
        k3=off[0],
        log_ess=off[1],
        delta_k3=here[0] - off[0],
        delta_log_ess=off[1] - here[1],
    )


async def _decoded(subject: Subject, setting: Setting, rollouts: Rollouts) -> Tensor:
    """[N] log-probs of an engine of this setting."""
    engine = subject.open(setting.config)
    release = subject.publish(setting.config, subject.weights(setting.config))
    try:
        await engine.load(release.manifest)
        subject.retire(setting.config, release)
        return await _said(engine, setting, rollouts)
    finally:
        await engine.close()


async def _said(engine: Engine, setting: Setting, rollouts: Rollouts) -> Tensor:
    asked = []
    for request, completion in zip(rollouts.requests, rollouts.completions, strict=True):
        if setting.whole:
            sampling = replace(request.sampling, top_p=1.0, top_k=0)
            request = replace(request, sampling=sampling)
        ids = completion.token_ids
        asked += _one_by_one(request, ids) if setting.prefill else [given(request, ids, "again")]
    size = setting.together
    batches = [asked[start : start + size] for start in range(0, len(asked), size)]
    return torch.cat([(await sample(engine, batch)).said for batch in batches])


def _one_by_one(request: GenerateRequest, ids: array[int]) -> list[GenerateRequest]:
    """A request for each token, whose prompt is all that came before it."""
    return [
        replace(
            given(request, ids[at : at + 1], f"at-{at}"),
            prompt_ids=request.prompt_ids + ids[:at],
        )
        for at in range(len(ids))
    ]
