"""All that can be refused before a run starts, without starting or writing anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trueup.config import TINY_AGENT, Config, CorrectionConfig
from trueup.environments.table import open_environment
from trueup.errors import ConfigError, RunDirectoryError
from trueup.models import catalog, chat, directory, gguf
from trueup.records.directory import RunDirectory
from trueup.training import resume
from trueup.types import Task


@dataclass(frozen=True, kw_only=True)
class World:
    """What a run needs to know of its environment."""

    tasks: Sequence[Task]
    heldout: Sequence[Task]
    vocabulary: tuple[str, ...]


def check(config: Config) -> World:
    """Refuse a configuration that cannot run here.

    Raises:
        UsageError: No sandbox works, the correction or one of its constants is unknown or out of
            range, or the model is unknown, missing or damaged, or has a tokenizer that does not
            fit.
    """
    world = _world(config)
    _check_correction(config.correction)
    _check_bypass(config)
    if config.model.path == TINY_AGENT:
        _check_words(config, world)
    else:
        model = catalog.find(config.model.path)
        if model is None:
            gguf.demand_package()
        else:
            check_model(model, world)
    return world


def check_model(model: Path, world: World) -> None:
    """Refuse a model directory that does not verify or does not speak the environment's words.

    Raises:
        CheckpointError: It does not.
    """
    directory.verify(model)
    directory.check_weights(model)
    chat.check(model, world.vocabulary)


def check_resume(run: RunDirectory, config: Config) -> tuple[World, resume.Found]:
    """Refuse a run that cannot go on; say where it would.

    Raises:
        UsageError: As `check`, no checkpoint verifies, or all steps are done.
    """
    world = check(config)
    found = resume.find(run)
    if found.start.step >= config.train.steps:
        raise RunDirectoryError(
            field="train.steps",
            rule=f"more than the {found.start.step} steps that this run has done",
            value=config.train.steps,
        )
    check_model(found.model, world)
    return world, found


def _check_words(config: Config, world: World) -> None:
    """The tiny agent is made of an environment's words, and there must be a list of them."""
    if not world.vocabulary:
        raise ConfigError(
            field="model.path",
            rule=f"a language model where environment.kind is {config.environment.kind}",
            value=config.model.path,
        )


def _check_correction(chosen: CorrectionConfig) -> None:
    from trueup.corrections.method import parts
    from trueup.corrections.table import find

    parts(find(chosen.preset), chosen.params, chosen.filters)


def _check_bypass(config: Config) -> None:
    """A ratio to μ is inside the clip already: a weight beside it would count the gap twice."""
    from trueup.corrections.table import find

    chosen = config.correction
    preset = find(chosen.preset)
    weighs = preset.name != "none" and preset.filter is None
    if config.train.mode == "bypass" and (weighs or chosen.normalize):
        raise ConfigError(
            field="train.mode",
            rule="decoupled with a correction that weighs: in bypass mode choose "
            "correction.preset=none or one that only rejects",
            value=f"bypass with {chosen.preset}",
        )


def _world(config: Config) -> World:
    environment = open_environment(config)
    try:
        return World(
            tasks=environment.tasks("train"),
            heldout=environment.tasks("heldout"),
            vocabulary=environment.vocabulary(),
        )
    finally:
        environment.close()
