"""A synchronous run is the textbook's algorithm, which is written out here a second time.

Nothing of the product computes here but the noise, whose rule is part of the contract: the policy
is the stock model, the whole sequence goes forward for every token that is sampled, probabilities,
advantages and losses come from their definitions, and every episode goes forward by itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from support.live_runs import Runs, digests, last_checkpoint, metrics, trained
from trueup.config import Config
from trueup.engines.embedded.sampling import uniforms
from trueup.environments.bugfix_source import OPERATORS, bugs
from trueup.records.directory import RunDirectory

pytestmark = pytest.mark.timeout(300)
"""Room to build the base policy on a busy machine."""

_STEPS = 5
_PLAIN = (
    f"train.steps={_STEPS}",
    "train.deterministic=true",
    "schedule.staleness=0",
    "correction.preset=none",
    "train.minibatches=4",
    "train.clip_low=0.02",
    "train.clip_high=0.03",
    "train.grad_clip=0.5",
)
"""Narrow clips, and several updates a step, so that both clips bind."""


@dataclass
class _Play:
    """An episode."""

    draw: int
    ids: list[int]
    action: list[int] = field(default_factory=list)
    """Positions of what was sampled."""
    logp: list[float] = field(default_factory=list)
    reward: float = 0.0
    """Of the file as it stands, which holds its bug, unless it is patched right."""
    advantage: float | None = None
    """None in a group without contrast."""


class _PlainLoop:
    def __init__(self, config: Config) -> None:
        self.config = config
        path = config.model.path
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._ids: dict[str, int] = Tokenizer.from_file(f"{path}/tokenizer.json").get_vocab()
        self._words = {index: word for word, index in self._ids.items()}
        self._bugs = [bug for task, bug in bugs().items() if task.split == "train"]
        random.Random(f"{config.seed}/0").shuffle(self._bugs)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=config.train.lr)
        self.version = 0

    def step(self, batch: list[tuple[int, int]]) -> list[_Play]:
        """Sample the (draw, member) of a step batch and learn from them, in that order."""
        plays = [self._play(draw, member) for draw, member in batch]
        self._learn(plays)
        return plays

    def _play(self, draw: int, member: int) -> _Play:
        bug = self._bugs[draw]
        play = _Play(draw=draw, ids=self._turn("<user>", bug.issue))
        for turn in range(3):
            key = (self.config.seed, draw, 0, member, 0, turn)
            said = [self._words[index] for index in self._say(play, key)]
            match said:
                case ["patch", operator, "<end>"] if operator in OPERATORS:
                    play.reward = float(operator == bug.correct)
                    return play
                case ["read", "<end>"]:
                    answer = bug.source(bug.buggy)
                case [*_, "<end>"]:
                    answer = "error : unknown action"
                case _:
                    return play
            if turn < 2:
                play.ids += self._turn("<env>", answer)
        return play

    def _turn(self, role: str, text: str) -> list[int]:
        return [self._ids[word] for word in (role, *text.split(), "<end>", "<agent>")]

    @torch.no_grad()
    def _say(self, play: _Play, key: tuple[int, ...]) -> list[int]:
        start = len(play.ids)
        for u in uniforms(key, self.config.engine.max_tokens):
            logits = self.model(input_ids=torch.tensor([play.ids])).logits[0, -1].double()
            cumulative = logits.softmax(-1).cumsum(-1)
            token = int((cumulative > u * cumulative[-1]).nonzero()[0])
            play.action.append(len(play.ids))
            play.ids.append(token)
            play.logp.append(float(logits.log_softmax(-1)[token]))
            if token == self._ids["<end>"]:
                break
        return play.ids[start:]

    def _logp(self, play: _Play) -> Tensor:
        logits = self.model(input_ids=torch.tensor([play.ids])).logits[0]
        at = torch.tensor(play.action)
        return logits.log_softmax(-1)[at - 1, torch.tensor(play.ids)[at]]

    def _learn(self, plays: list[_Play]) -> None:
        train = self.config.train
        for draw in {play.draw for play in plays}:
            rewards = [play.reward for play in plays if play.draw == draw]
            for play in plays:
                if play.draw == draw and len(set(rewards)) > 1:
                    play.advantage = (play.reward - mean(rewards)) / stdev(rewards)
        tokens = sum(len(play.action) for play in plays if play.advantage is not None)
        old = [self._logp(play).detach() for play in plays]
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.version)
        order = torch.randperm(len(plays), generator=generator)
        updates = 0
        for part in order.tensor_split(train.minibatches):
            self._optimizer.zero_grad()
            loss = torch.zeros(())
            for index in part.tolist():
                advantage = plays[index].advantage
                if advantage is not None:
                    ratio = (self._logp(plays[index]) - old[index]).exp()
                    clipped = ratio.clamp(1 - train.clip_low, 1 + train.clip_high)
                    gain = torch.minimum(ratio * advantage, clipped * advantage).sum()
                    loss = loss - train.minibatches / tokens * gain
            if loss.requires_grad:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), train.grad_clip)
                self._optimizer.step()
                updates += 1
        self.version += bool(updates)


@pytest.fixture(scope="module")
def run(runs: Runs) -> RunDirectory:
    return runs.finished("plain", *_PLAIN)


@pytest.fixture(scope="module")
def recorded(run: RunDirectory) -> list[list[dict[str, Any]]]:
    """Per step, the rows of its episodes in the order in which they were consumed."""
    found: list[list[dict[str, Any]]] = [[] for _ in range(_STEPS)]
    for row in trained(run):
        found[row["step"]].append(row)
    return found


@pytest.fixture(scope="module")
def loop(runs: Runs, recorded: list[list[dict[str, Any]]]) -> tuple[_PlainLoop, list[list[_Play]]]:
    """The loop after its last step, and what it sampled.

    Only the order within a step is taken from the run: it is that in which groups closed.
    """
    torch.set_num_threads(1)
    loop = _PlainLoop(runs.config(*_PLAIN))
    batches = [[(row["group"], int(row["episode"][8:10])) for row in rows] for rows in recorded]
    for step, batch in enumerate(batches):
        draws = range(4 * step, 4 * step + 4)
        assert sorted(batch) == [(draw, member) for draw in draws for member in range(4)]
    return loop, [loop.step(batch) for batch in batches]


def test_every_token_and_reward_is_that_of_the_plain_loop(
    recorded: list[list[dict[str, Any]]], loop: tuple[_PlainLoop, list[list[_Play]]]
) -> None:
    for rows, plays in zip(recorded, loop[1], strict=True):
        assert [row["token_ids"] for row in rows] == [play.ids for play in plays]
        assert [row["reward"] for row in rows] == [play.reward for play in plays]
        for row, play in zip(rows, plays, strict=True):
            assert [i for i, flag in enumerate(row["action"]) if flag] == play.action


def test_log_probs_and_advantages_are_those_of_the_plain_loop(
    recorded: list[list[dict[str, Any]]], loop: tuple[_PlainLoop, list[list[_Play]]]
) -> None:
    for rows, plays in zip(recorded, loop[1], strict=True):
        for row, play in zip(rows, plays, strict=True):
            assert row["logp_behaviour"] == pytest.approx(play.logp, abs=1e-4)
            assert row["logp_target"] == pytest.approx(play.logp, abs=1e-4)
            assert row["keep"] == [play.advantage is not None] * len(play.action)
            if play.advantage is not None:
                assert row["advantage"] == pytest.approx([play.advantage] * len(play.action))


def test_the_weights_are_those_of_the_plain_loop(
    run: RunDirectory, loop: tuple[_PlainLoop, list[list[_Play]]]
) -> None:
    """Both compute in float32 and sum in another order. Adam divides a gradient by its own size, so
    where that is rounding alone a weight may differ by a part of a step (measured: lr/30, a mean of
    lr/10⁴); a weight moves by up to 15 steps in all."""
    plain = loop[0]
    weights = load_file(last_checkpoint(run) / "model.safetensors")
    lr = plain.config.train.lr
    assert max(digests(run)) == plain.version == _STEPS
    assert weights.keys() == plain.model.state_dict().keys()
    for name, weight in plain.model.state_dict().items():
        difference = (weights[name] - weight).abs()
        assert float(difference.max()) < lr / 5, name
        assert float(difference.mean()) < lr / 500, name


def test_the_comparison_sees_clips_and_large_gradients(run: RunDirectory) -> None:
    found = metrics(run)
    assert sum(found[step, "update/clip_high"].sum for step in range(_STEPS)) > 0
    assert sum(found[step, "update/clip_low"].sum for step in range(_STEPS)) > 0
    assert any(found[step, "update/grad_norm"].max > 0.5 for step in range(_STEPS))
