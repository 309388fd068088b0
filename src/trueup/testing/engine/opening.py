"""From the options of the command line to an engine that serves."""

from __future__ import annotations

import importlib
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from trueup.engines.base import Engine
from trueup.engines.table import Build, factory
from trueup.errors import UsageError
from trueup.sync.digest import digest
from trueup.testing.engine.pushing import Publisher
from trueup.testing.engine.scoring import Scorer, engine_config
from trueup.testing.engine.subject import Subject

SLOTS = 8
"""Requests in flight at once."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `pytest --trueup-engine` was given."""

    engine: str | Build
    """The address of a server, or a `Build`, or MODULE:FUNCTION of one."""
    kind: str
    """What speaks with the server: a name that `engine.kind` takes."""
    precision: str
    """Of the engine's forward, `bfloat16+int8`."""
    model: Path | None
    """Hugging Face directory; without weights it says only what the vocabulary is."""
    vocab_size: int | None
    """Where no directory is given."""


async def open_subject(options: Options, directory: Path) -> Subject:
    """Build the engine; one that takes weights gets those of the model directory.

    Args:
        options: What was given.
        directory: An empty one, for what stands in for a model directory.

    Raises:
        UsageError: An option says something impossible, or too little.
        OSError: The model directory cannot be read.
        Fault: The engine does not answer, or refuses the weights.
    """
    model = directory if options.model is None else options.model
    if options.model is None:
        _describe(model, options.vocab_size)
    config = json.loads((model / "config.json").read_text("utf-8"))
    scorer = Scorer(model) if any(model.glob("*.safetensors")) else None
    publisher = Publisher(base=scorer.base if scorer else {}, precision=options.precision)
    engine = _build(options, model, publisher)
    async with AsyncExitStack() as unless_it_serves:
        unless_it_serves.push_async_callback(engine.close)
        loads = (await engine.info()).loads and scorer is not None
        if loads:
            await engine.load(publisher.first())
        info = await engine.info()
        unless_it_serves.pop_all()
    return Subject(
        engine=engine,
        info=info,
        vocabulary=int(config["vocab_size"]),
        stop_id=_stop_id(config),
        scorer=scorer,
        publisher=publisher if loads else None,
    )


def _build(options: Options, model: Path, publisher: Publisher) -> Engine:
    more: dict[str, Any] = {}
    if callable(options.engine):
        build = options.engine
    elif "://" in options.engine:
        build = factory(options.kind)
        more = {"kind": options.kind, "url": options.engine}
    else:
        build = _named(options.engine)
    return build(
        engine_config(options.precision, slots=SLOTS, **more),
        model=model,
        engine_id="under-test",
        epoch=0,
        fetch=publisher.transport.fetch,
        digest=digest,
        paced=False,
    )


def _describe(directory: Path, vocab_size: int | None) -> None:
    """Write the little of a model directory that is known."""
    if vocab_size is None or vocab_size < 2:
        raise UsageError(
            field="--trueup-vocab-size",
            rule="given where --trueup-model is not, at least 2",
            value=vocab_size,
        )
    (directory / "config.json").write_text(json.dumps({"vocab_size": vocab_size}), "utf-8")


def _named(name: str) -> Build:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            field="--trueup-engine", rule="a URL or MODULE:FUNCTION", value=f"{name}: {error}"
        ) from error
    return cast("Build", found)


def _stop_id(config: dict[str, Any]) -> int:
    """The end-of-text token; the last id of the vocabulary where none is named."""
    named = config.get("eos_token_id")
    if isinstance(named, list):
        named = named[0] if named else None
    return int(named) if named is not None else int(config["vocab_size"]) - 1
