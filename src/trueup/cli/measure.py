"""`trueup measure`: how far an engine and the trainer are apart at identical weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trueup.cli.output import AsJson, emit, say, show
from trueup.cli.runs import shown

if TYPE_CHECKING:
    from trueup.diagnosis.acts import Judgement
    from trueup.diagnosis.measure import Measurement
    from trueup.reports.figure_data import Figure

RESULT, FIGURE = "result.json", "figure.svg"

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="tiny-agent, smollm2-135m, or a Hugging Face directory."),
]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="embedded, vllm, transformers, or the URL of an OpenAI-compatible server.",
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", metavar="NAME", help="float32 or bfloat16.")]
Quantize = Annotated[
    str, typer.Option("--quantize", metavar="NAME", help="A scheme of engine.quantize.")
]
Prompts = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="FILE", help="A prompt per line.  [default: our own]"),
]
Threads = Annotated[int, typer.Option("--threads", min=1, help="Torch threads.")]


def measure(
    model: Model,
    engine: EngineName = "embedded",
    dtype: Dtype = "bfloat16",
    quantize: Quantize = "none",
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens to sample.")] = 960,
    prompts: Prompts = None,
    served: Annotated[
        Path | None,
        typer.Option(
            "--served",
            metavar="DIR",
            help="Weights that the engine serves, if not MODEL's: then the gap is split.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help=f"Write {RESULT} and {FIGURE} there."),
    ] = None,
    threads: Threads = 2,
    as_json: AsJson = False,
) -> None:
    """Measure the mismatch of an engine and the trainer at the same weights, and say what it is."""
    import asyncio

    from trueup.diagnosis.acts import judge
    from trueup.diagnosis.measure import ROWS
    from trueup.diagnosis.measure import measure as run
    from trueup.diagnosis.subject import Subject, engine_config

    config = engine_config(engine, dtype=dtype, quantize=quantize, slots=ROWS, threads=threads)
    subject = Subject.of(model, prompts=prompts, threads=threads)
    try:
        found = asyncio.run(run(subject, config, tokens=tokens, served=served, tell=say))
    finally:
        subject.close()
    judgement = judge(found)
    if out is not None:
        _write(found, judgement, out)
    if as_json:
        emit(_record(found, judgement))
        return
    show(
        f"{found.engine} in {found.precision}, {found.model}: {found.tokens} tokens in "
        f"{found.completions} completions, d = log π_trainer − log μ_engine in nats"
    )
    for row in _rows(found):
        show(row)
    for low, high, count, mean in _bins(found):
        show(f"engine probability [{low:g}, {high:g}]: {count:5d} tokens, mean |d| {mean:.2g}")
    stale, engine_part = found.split.staleness, found.split.engine
    show(
        f"split: staleness {stale.mean:+.2g}, engine {engine_part.mean:+.2g} nats on the mean; "
        f"{stale.share:.0%} and {engine_part.share:.0%} of E[d²]"
    )
    for sentence in (*judgement.sentences, *(f"note: {note}" for note in found.notes)):
        show(sentence)


def _record(found: Measurement, judgement: Judgement) -> dict[str, Any]:
    """Everything but the curves, as plain values."""
    return {
        "model": found.model,
        "engine": found.engine,
        "precision": found.precision,
        "tokens": found.tokens,
        "completions": found.completions,
        "comparisons": [asdict(line) for line in found.lines],
        "by_probability": [asdict(b) for b in found.bins],
        "split": {
            "staleness": asdict(found.split.staleness),
            "engine": asdict(found.split.engine),
        },
        "corrections": [asdict(row) for row in judgement.rows],
        "recommendation": asdict(judgement.recommendation),
        "verdict": list(judgement.sentences),
        "notes": list(found.notes),
    }


def _write(found: Measurement, judgement: Judgement, out: Path) -> None:
    from trueup.reports.standalone import standalone

    figures = _figures(found)
    record: Mapping[str, Any] = {**_record(found, judgement), "figures": figures}
    out.mkdir(parents=True, exist_ok=True)
    (out / RESULT).write_text(f"{json.dumps(record, indent=1)}\n", encoding="utf-8")
    title = f"Mismatch of {found.engine} and the trainer, {found.model}"
    (out / FIGURE).write_text(f"{standalone(figures, title=title)}\n", encoding="utf-8")
    say(f"wrote {RESULT} and {FIGURE} in {shown(out)}")


def _figures(found: Measurement) -> Sequence[Figure]:
    from trueup.reports.mismatch import mismatch_figures

    return mismatch_figures(found.curves, [(b.low, b.high, b.abs_mean) for b in found.bins])


def _bins(found: Measurement) -> list[tuple[float, float, int, float]]:
    return [(b.low, b.high, b.tokens, b.abs_mean) for b in found.bins]


def _rows(found: Measurement) -> list[str]:
    """The comparisons as lines that do not wrap at 100 columns."""
    heads = ("mean", "median", "p99", "max", "max |Σ|", "ESS", "z")
    rows = [f"{'comparison':39}" + "".join(f"{head:>9}" for head in heads)]
    for line in found.lines:
        figures = (line.abs_mean, line.abs_median, line.abs_p99, line.abs_max, line.sum_max)
        cells = [f"{value:.1e}" if value else "0" for value in figures]
        cells += [f"{line.ess:.4f}", "–" if line.z is None else f"{line.z:+.1f}"]
        rows.append(f"{line.name:39}" + "".join(f"{cell:>9}" for cell in cells))
    return rows
