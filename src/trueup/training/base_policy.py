"""The base policy of TinyAgent: supervised fine-tuning on demonstrations of the interface.

Reinforcement learning needs a policy that acts validly and succeeds sometimes. Demonstrations of
two kinds give it that and no more: most patch at once with a uniformly random operator (blind),
some read the source first and then mostly patch right. The base therefore knows every action, reads
now and then, and passes in about one attempt of four; that reading pays is left for it to find out.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol, cast

import torch

from trueup import config
from trueup.environments.base import Environment
from trueup.errors import CheckpointError
from trueup.models.chat import Renderer, check
from trueup.models.directory import verify
from trueup.models.load import save_model
from trueup.models.logprobs import action_logprobs
from trueup.models.packed import PackedBatch
from trueup.models.tiny import SPECIALS, build_tiny, build_tokenizer, tiny_config
from trueup.types import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SEED = 1
"""Every run starts from the same base, so that the seed of a run varies what reinforcement does."""

_FORMAT = 1
"""Raised when equal settings no longer mean equal weights."""

_READ = "read"

_MICROBATCH_TOKENS = 768
"""Keeps the few long demonstrations apart from the many short ones: 35 instead of 57 ms a step."""


class Teachable(Environment, Protocol):
    """An environment whose training tasks can be demonstrated."""

    def actions(self) -> tuple[str, ...]:
        """Every patch that the agent can try."""
        ...

    def solution(self, task: Task) -> str:
        """The patch that passes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSettings:
    """Constants of the fine-tuning."""

    steps: int = 400
    demonstrations_per_step: int = 64
    lr: float = 2e-3
    """Constant for half of the steps, then linear to 0: at a constant rate some seeds end in the
    middle of a spike."""
    grad_clip: float = 1.0
    """Largest gradient norm."""
    read_share: float = 0.2
    """Share of demonstrations that read the source before they patch."""
    right_share: float = 0.8
    """Share of those that then patch right; the others, like the blind, patch at random."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """What can be demonstrated of one task."""

    issue: str
    source: str
    """What reading shows."""
    solution: str
    """The patch that passes."""


def base_policy(
    environment: Teachable,
    *,
    seed: int,
    cache_dir: Path | None = None,
    settings: BaseSettings | None = None,
) -> Path:
    """The base policy as a Hugging Face directory, trained on first use and cached by content.

    Args:
        environment: Gives the training tasks, the vocabulary and the actions.
        seed: Of the initial weights and of the demonstrations.
        cache_dir: Where bases are kept; `$TRUEUP_CACHE`, else `~/.cache/trueup`.
        settings: Constants of the fine-tuning; the defaults of `BaseSettings` when None.

    Raises:
        CheckpointError: The cache cannot be written.
    """
    settings = settings or BaseSettings()
    lessons = _lessons(environment)
    words, actions = environment.vocabulary(), environment.actions()
    key = _digest(
        {
            "format": _FORMAT,
            "seed": seed,
            "settings": asdict(settings),
            "architecture": tiny_config(len(words) + len(SPECIALS)).to_diff_dict(),
            "words": words,
            "actions": actions,
            "lessons": [asdict(lesson) for lesson in lessons],
        }
    )
    target = (cache_dir or config.cache_dir()) / f"tiny-agent-{key[:16]}"
    if _intact(target, words):
        return target
    with TemporaryDirectory() as scratch, _one_thread():
        size = build_tokenizer(words, Path(scratch))
        model: PreTrainedModel = build_tiny(size, seed)
        _fine_tune(model, Renderer.load(Path(scratch)), lessons, actions, settings, seed)
        save_model(model, target, tokenizer_files_from=Path(scratch))
    return target


def _fine_tune(
    model: PreTrainedModel,
    renderer: Renderer,
    lessons: Sequence[Lesson],
    actions: Sequence[str],
    settings: BaseSettings,
    seed: int,
) -> None:
    draw = random.Random(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
    steps = settings.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, 2.0 * (steps - step) / steps)
    )
    for _ in range(steps):
        shown = [
            demonstration(renderer, draw, lessons, actions, settings)
            for _ in range(settings.demonstrations_per_step)
        ]
        batch = PackedBatch.pack([ids for ids, _ in shown], [flags for _, flags in shown])
        scores = action_logprobs(model, batch, microbatch_tokens=_MICROBATCH_TOKENS)
        loss = -scores.logp.mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
        optimizer.step()
        schedule.step()


def demonstration(
    renderer: Renderer,
    draw: random.Random,
    lessons: Sequence[Lesson],
    actions: Sequence[str],
    settings: BaseSettings,
) -> tuple[array[int], array[int]]:
    """One episode as it would have been sampled: ids and, per id, 1 where it is the agent's.

    Args:
        renderer: Text to ids.
        draw: Source of the choices.
        lessons: Tasks, each equally likely.
        actions: Patches, each equally likely where the choice is blind.
        settings: The shares.
    """
    lesson = draw.choice(lessons)
    parts = [(renderer.start(lesson.issue), 0)]
    right = False
    if draw.random() < settings.read_share:
        parts += [(renderer.act(_READ), 1), (renderer.observe(lesson.source), 0)]
        right = draw.random() < settings.right_share
    parts += [(renderer.act(lesson.solution if right else draw.choice(actions)), 1)]
    ids, flags = array("i"), array("b")
    for part, sampled in parts:
        ids.extend(part)
        flags.extend([sampled] * len(part))
    return ids, flags


def _lessons(environment: Teachable) -> list[Lesson]:
    found = []
    for task in environment.tasks("train"):
        env = environment.make(task, seed=0)
        try:
            issue, source = env.start(), env.step(_READ).observation
        finally:
            env.close()
        found.append(Lesson(issue=issue, source=source, solution=environment.solution(task)))
    return found


def _intact(directory: Path, words: Sequence[str]) -> bool:
    """Whether the cache holds this base; an entry that does not verify is built again."""
    try:
        sealed = directory.is_dir() and verify(directory)
        if sealed:
            check(directory, words)
    except CheckpointError:
        return False
    return sealed


def _digest(record: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums in one order, so that the weights do not depend on the machine's load."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def main() -> None:
    """Print where the base for the environment of a configuration (TOML on stdin) lies."""
    from trueup.environments.table import open_environment

    settings = config.load(sys.stdin.read())
    environment = cast("Teachable", open_environment(settings))
    sys.stdout.write(f"{base_policy(environment, seed=_SEED)}\n")
    environment.close()


if __name__ == "__main__":
    main()
