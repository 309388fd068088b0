"""Which corrections would act on a gap, and on what share of its tokens; the verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trueup.corrections.advice import Recommendation, facts, recommend
from trueup.corrections.whatif import Row, whatif
from trueup.diagnosis.measure import Line, Measurement

CHAPTER = (
    "On the GPU of the tutorial's chapter the same bf16 trainer differs by 3.1e-02 nats between "
    "batch 1 and batch 30, and by 5.6e-06 in fp32."
)
"""Qwen3-0.6B, 960 tokens."""
_SHOWN = ("tis", "mis", "seq-tis", "seq-mis", "geo", "ais")
_UNBIASED = 4.0
"""|z| of the calibration above which the log-probs are not those of the distribution sampled."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a measurement means."""

    rows: tuple[Row, ...]
    """What each correction would do."""
    recommendation: Recommendation
    sentences: tuple[str, ...]


def judge(found: Measurement) -> Judgement:
    """Say in words what was measured."""
    rows = whatif([found.gap], presets=_SHOWN).rows
    advice = recommend(facts([found.gap]), rows)
    sentences = [
        _floor(found),
        *_batches(found.lines),
        *_acting(rows),
        f"recommended: {advice.preset}. {advice.reason}",
        *_calibration(found.lines),
    ]
    return Judgement(rows=rows, recommendation=advice, sentences=tuple(sentences))


def _floor(found: Measurement) -> str:
    line = _named(found.lines, "fp32 trainer, batch 1 vs engine")
    return (
        f"floor of {found.engine} in {found.precision}: mean |d| {line.abs_mean:.2g} nats per "
        f"token (p99 {line.abs_p99:.2g}, max {line.abs_max:.2g}); summed over a completion up to "
        f"{line.sum_max:.2g}; no correction and no synchronisation goes below it"
    )


def _batches(lines: Sequence[Line]) -> list[str]:
    full = _named(lines, "bf16 trainer: batch 1 vs 30").abs_mean
    words = "agrees exactly" if full == 0 else f"differs by {full:.1e} nats"
    said = [f"here the bf16 full forward {words} between batch 1 and batch 30"]
    decoded = [line for line in lines if line.name == "decode: batch 1 vs 30"]
    if decoded:
        apart = decoded[0].abs_mean
        words = "agree exactly" if apart == 0 else f"differ by {apart:.1e} nats"
        said.append(f"decode batches of 1 and of 30 {words}")
    return ["; ".join(said) + ". " + CHAPTER]


def _acting(rows: Sequence[Row]) -> list[str]:
    shares = [f"{row.preset} {row.over_cap:.2%}" for row in rows if row.over_cap is not None]
    return [f"share of the tokens that a correction would act on: {', '.join(shares)}"]


def _calibration(lines: Sequence[Line]) -> list[str]:
    line = _named(lines, "fp32 trainer, batch 1 vs engine")
    if line.z is None or abs(line.z) <= _UNBIASED:
        return []
    return [
        f"the mean ratio is {line.z:.1f} standard errors from 1: these are not the log-probs of "
        "what was sampled from (temperature, truncated support, wrong version); run trueup bisect"
    ]


def _named(lines: Sequence[Line], name: str) -> Line:
    return next(line for line in lines if line.name == name)
