"""The model, the prompts and the engines that a diagnosis is about, from what a user names."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from trueup.config import Config, EngineConfig, ModelConfig
from trueup.diagnosis.exam import Release
from trueup.diagnosis.scorer import Weights
from trueup.engines import table
from trueup.engines.base import Engine
from trueup.environments.bugfix import BugfixEnvironment
from trueup.environments.sandbox.none import NoSandbox
from trueup.errors import CheckpointError, UsageError
from trueup.models.chat import ROLES_FILE, Renderer, load_tokenizer
from trueup.models.load import load_model, state_tensors
from trueup.sync.base import Transport
from trueup.sync.digest import digest
from trueup.sync.table import open_transport
from trueup.training.runtime_local import base_model
from trueup.types import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that adds all numbers of a list.",
    "What is 17 + 25? Think step by step.",
    "Name three animals that live in the sea.",
    "Translate 'good morning' into Spanish.",
    "How does a bicycle stay upright?",
    "Give me a short recipe for tomato soup.",
    "What is the difference between a list and a tuple?",
    "Tell a very short story about a lost key.",
    "Why do leaves turn red in autumn?",
    "Write one line of SQL that counts the rows of a table.",
    "What should I see in Rome in one day?",
    "Is 91 a prime number? Explain.",
    "Describe the taste of an apple.",
)
"""What is asked where no prompts are given."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model directory with its prompts."""

    name: str
    """As the user typed it."""
    directory: Path
    prompts: tuple[array[int], ...]
    stop_ids: tuple[int, ...]
    threads: int = 2
    _transports: list[Transport] = field(default_factory=list)
    _versions: Iterator[int] = field(default_factory=lambda: count(1))

    @classmethod
    def of(cls, name: str, *, prompts: Path | None = None, threads: int = 2) -> Self:
        """Find a model and read its prompts.

        Args:
            name: `tiny-agent`, a model of the catalogue, or a Hugging Face directory.
            prompts: A text file, one prompt per line; None for prompts of our own.
            threads: Of the trainer's forward and of engines of this process.

        Raises:
            CheckpointError: No such model, or it has no tokenizer.
            UsageError: The file holds no prompt, or cannot be read.
        """
        directory = base_model(Config(model=ModelConfig(path=name)))
        texts = _lines(prompts) if prompts is not None else None
        ids, stops = _tokenised(directory, texts)
        return cls(name=name, directory=directory, prompts=ids, stop_ids=stops, threads=threads)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model in float32."""
        return load_model(self.directory)

    def requests(self, rows: int, tokens: int) -> list[GenerateRequest]:
        """Requests of so many tokens each, which nothing stops."""
        return [
            GenerateRequest(
                session=f"measure-{row}",
                prompt_ids=self.prompts[row % len(self.prompts)],
                sampling=SamplingParams(max_tokens=tokens, stop_ids=(), key=(row,)),
            )
            for row in range(rows)
        ]

    def open(self, config: EngineConfig) -> Engine:
        """An engine that serves nothing yet.

        Raises:
            ConfigError: It cannot do what is asked for.
            EngineFault: It cannot be reached or does not start.
        """
        torch.set_num_threads(self.threads)
        return table.factory(config.kind)(
            config,
            model=self.directory,
            engine_id=config.kind,
            epoch=0,
            fetch=self._transport(config).fetch,
            digest=digest,
            paced=False,
        )

    def weights(self, config: EngineConfig, directory: Path | None = None) -> dict[str, Tensor]:
        """Weights in the dtype that an engine takes.

        Args:
            config: The engine's.
            directory: Where they lie; None for the model's own.
        """
        held = self.model if directory is None else load_model(directory)
        narrow = config.quantize == "none" and config.dtype == "bfloat16"
        dtype = torch.bfloat16 if narrow else torch.float32
        return {name: tensor.to(dtype) for name, tensor in state_tensors(held).items()}

    def publish(self, config: EngineConfig, weights: Weights) -> Release:
        """Publish weights as the next version."""
        manifest = self._transport(config).publish(next(self._versions), weights)
        return Release.of(manifest, weights)

    def retire(self, config: EngineConfig, release: Release) -> None:
        """Free the memory of a version, and of those before it, once it is loaded."""
        self._transport(config).retire(release.version + 1)

    def close(self) -> None:
        """Free what was published."""
        while self._transports:
            self._transports.pop().close()
        self._root.cleanup()

    @cached_property
    def _root(self) -> TemporaryDirectory[str]:
        return TemporaryDirectory(prefix="trueup-diagnosis-")

    @cached_property
    def _shared(self) -> Transport:
        return self._kept(open_transport("shared_memory", Path(self._root.name)))

    @cached_property
    def _local(self) -> Transport:
        return self._kept(open_transport("inprocess", Path(self._root.name)))

    def _transport(self, config: EngineConfig) -> Transport:
        return self._shared if config.kind == "vllm" else self._local

    def _kept(self, transport: Transport) -> Transport:
        self._transports.append(transport)
        return transport


def engine_config(
    engine: str, *, dtype: str, quantize: str, slots: int, threads: int
) -> EngineConfig:
    """The engine that a user names.

    Args:
        engine: A kind of `engines.table`, or the URL of an OpenAI-compatible server.
        dtype: Its arithmetic.
        quantize: Its grid.
        slots: Completions at once.
        threads: Of an engine of this process.

    Raises:
        ConfigError: Unknown kind, dtype or scheme.
    """
    from trueup import config as configuration

    remote = "://" in engine
    settings = {
        "kind": "openai" if remote else engine,
        "url": engine if remote else "",
        "dtype": dtype,
        "quantize": quantize,
        "slots": slots,
        "threads": threads,
    }
    return configuration.from_dict({"engine": settings}).engine


def _lines(path: Path) -> list[str]:
    try:
        found = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(field="--prompts", rule="a readable text file", value=str(error)) from None
    if not found:
        raise UsageError(field="--prompts", rule="a file with a prompt per line", value=str(path))
    return found


def _tokenised(
    directory: Path, texts: Sequence[str] | None
) -> tuple[tuple[array[int], ...], tuple[int, ...]]:
    """Prompts, as a conversation where the model has roles, and what ends a turn."""
    if not (directory / ROLES_FILE).exists():
        tokenizer = load_tokenizer(directory)
        ids = [tokenizer.encode(text).ids for text in texts or QUESTIONS]
        return tuple(array("i", line) for line in ids), ()
    renderer = Renderer.load(directory)
    if texts is None:
        texts = _tasks() if renderer.closed_vocabulary else QUESTIONS
    found = tuple(renderer.start(text) for text in texts)
    if not all(found):
        raise CheckpointError(field=str(directory), rule="with prompts that have tokens", value="")
    return found, renderer.stop_ids


def _tasks() -> list[str]:
    """What the tiny agent is asked; no code is run for it."""
    environment = BugfixEnvironment(NoSandbox(), deadline_s=1.0)
    found = []
    for split in ("train", "heldout"):
        for task in environment.tasks(split):
            env = environment.make(task, seed=0)
            found.append(env.start())
            env.close()
    environment.close()
    return found
