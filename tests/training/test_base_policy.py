import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from trueup.environments.base import Step
from trueup.models.chat import Renderer
from trueup.models.directory import MANIFEST, verify
from trueup.models.load import load_model, state_tensors
from trueup.models.logprobs import action_logprobs
from trueup.models.packed import PackedBatch
from trueup.training.base_policy import BaseSettings, Lesson, base_policy, demonstration
from trueup.types import Task

_OPERATORS = ("+", "-", "*", "//", "%")
_WORDS = ("sum", "gap", "product", "ratio", "rest")
_NAMES = ("clamp", "blend", "parse", "trace")
_SHORT = BaseSettings(steps=2, demonstrations_per_step=4)


@dataclass
class _Env:
    issue: str
    source: str
    sandbox: str = "none"
    closed: bool = False

    def start(self) -> str:
        return self.issue

    def step(self, action: str) -> Step:
        assert action == "read"
        return Step(observation=self.source, done=False)

    def finish(self) -> float:
        return 0.0

    def close(self) -> None:
        self.closed = True


class _Environment:
    """Every name with every operator; the issue shows the name, the source the operator's word."""

    name = "fake"

    def __init__(self) -> None:
        self.made: list[_Env] = []
        self._tasks = {
            Task(id=f"{name}/{index}", split="train"): (name, index)
            for name in _NAMES
            for index in range(len(_OPERATORS))
        }

    def tasks(self, split: str) -> Sequence[Task]:
        return [task for task in self._tasks if task.split == split]

    def make(self, task: Task, *, seed: int) -> _Env:
        name, index = self._tasks[task]
        self.made.append(_Env(f"fix {name}", f"# the {_WORDS[index]} of x and y : {name}"))
        return self.made[-1]

    def vocabulary(self) -> tuple[str, ...]:
        own = ("fix", "read", "patch", "#", "the", "of", "x", "and", "y", ":")
        return (*own, *_OPERATORS, *_WORDS, *_NAMES)

    def actions(self) -> tuple[str, ...]:
        return tuple(f"patch {operator}" for operator in _OPERATORS)

    def solution(self, task: Task) -> str:
        return self.actions()[self._tasks[task][1]]

    def close(self) -> None:
        return


def _base(cache: Path, *, seed: int = 0, settings: BaseSettings = _SHORT) -> Path:
    return base_policy(_Environment(), seed=seed, cache_dir=cache, settings=settings)


def test_the_base_is_a_whole_model_directory_and_every_attempt_is_closed(tmp_path: Path):
    environment = _Environment()
    directory = base_policy(environment, seed=0, cache_dir=tmp_path, settings=_SHORT)
    assert verify(directory)
    assert load_model(directory).config.vocab_size == Renderer.load(directory).vocab_size == 30
    assert len(environment.made) == 20
    assert all(env.closed for env in environment.made)
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]


def test_a_base_is_made_once_and_again_only_for_other_content(tmp_path: Path):
    directory = _base(tmp_path)
    made = (directory / MANIFEST).stat().st_mtime_ns
    assert _base(tmp_path) == directory
    assert (directory / MANIFEST).stat().st_mtime_ns == made
    others = {_base(tmp_path, seed=1), _base(tmp_path, settings=BaseSettings(steps=1))}
    assert len(others | {directory}) == 3


def test_equal_seeds_give_equal_weights_on_any_number_of_threads(tmp_path: Path):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        one = _base(tmp_path / "one")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    two = _base(tmp_path / "two")
    weights = state_tensors(load_model(two))
    for name, tensor in state_tensors(load_model(one)).items():
        assert torch.equal(tensor, weights[name])


@pytest.mark.parametrize("damage", ["flip", "truncate", "unsealed", "empty"])
def test_a_corrupt_cache_entry_is_made_again(damage: str, tmp_path: Path):
    directory = _base(tmp_path)
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    match damage:
        case "flip":
            weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        case "truncate":
            weights.write_bytes(whole[:-1])
        case "unsealed":
            (directory / MANIFEST).unlink()
        case "empty":
            for path in directory.iterdir():
                path.unlink()
    assert _base(tmp_path) == directory
    assert verify(directory)
    assert weights.read_bytes() == whole


def test_the_cache_is_where_the_environment_variable_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRUEUP_CACHE", str(tmp_path / "cache"))
    directory = base_policy(_Environment(), seed=0, settings=_SHORT)
    assert directory.parent == tmp_path / "cache"


_LESSON = Lesson(issue="fix clamp", source="# the gap of x and y : clamp", solution="patch -")
_ACTIONS = _Environment().actions()


def test_demonstrations_are_of_two_kinds_in_the_stated_shares(tmp_path: Path):
    renderer = Renderer.load(_base(tmp_path))
    draw, settings = random.Random(0), BaseSettings()
    reads = right_read = right_blind = 0
    for _ in range(4000):
        ids, flags = demonstration(renderer, draw, [_LESSON], _ACTIONS, settings)
        sampled = [i for i, flag in zip(ids, flags, strict=True) if flag]
        patch = renderer.action_text(sampled[-3:])
        assert patch in _ACTIONS
        if renderer.action_text(sampled[:-3]) == "read":
            reads += 1
            right_read += patch == "patch -"
            assert list(ids) == [
                *renderer.start(_LESSON.issue),
                *renderer.act("read"),
                *renderer.observe(_LESSON.source),
                *sampled[-3:],
            ]
        else:
            right_blind += patch == "patch -"
            assert list(ids) == [*renderer.start(_LESSON.issue), *sampled]
    # five standard deviations each: together less than one false alarm in 500 000 seeds
    assert abs(reads / 4000 - 0.2) < 5 * (0.2 * 0.8 / 4000) ** 0.5
    assert abs(right_read / reads - 0.84) < 5 * (0.84 * 0.16 / 800) ** 0.5
    assert abs(right_blind / (4000 - reads) - 0.2) < 5 * (0.2 * 0.8 / 3200) ** 0.5


@pytest.mark.slow
def test_the_base_acts_validly_reads_seldom_and_passes_at_most_in_35_of_100(tmp_path: Path):
    directory = _base(tmp_path, settings=BaseSettings())
    model, renderer = load_model(directory), Renderer.load(directory)
    start, read = renderer.start("fix clamp"), renderer.act("read")

    def probability(prefix: Sequence[int], action: Sequence[int]) -> float:
        ids = torch.tensor([*prefix, *action])
        batch = PackedBatch(
            token_ids=ids,
            offsets=torch.tensor([0, len(ids)]),
            action_index=torch.arange(len(prefix), len(ids)),
        )
        with torch.no_grad():
            return float(action_logprobs(model, batch).logp.sum().exp())

    reads = probability(start, read)
    blind = [probability(start, renderer.act(action)) for action in _ACTIONS]
    informed = [
        probability(
            [*start, *read, *renderer.observe(f"# the {word} of x and y : clamp")],
            renderer.act(action),
        )
        for word, action in zip(_WORDS, _ACTIONS, strict=True)
    ]
    assert 0.1 < reads < 0.3
    assert reads + sum(blind) > 0.97, "other actions are invalid"
    assert min(informed) > 0.6
    assert (reads * sum(informed) + sum(blind)) / len(_ACTIONS) <= 0.35
