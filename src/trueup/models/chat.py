"""Text to token ids and back for episodes of many turns, token-in / token-out.

An episode is one growing list of ids: what the policy sampled is kept as sampled and never passes
through text, so the ids that are trained are the ids that were sampled (re-tokenising a
conversation can move a token boundary). Only what the world says is tokenised, once, between the
markers of its role. Those markers are control tokens: the same characters inside the world's text
stay characters, so an environment cannot open a turn.

Loads neither torch nor transformers: the process that runs environments stays light.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from trueup.errors import CheckpointError, DataError
from trueup.models.chat_template import derive_markers, find_template
from trueup.models.directory import read_json, read_text

ROLES_FILE = "renderer.json"
_TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "config.json"

_PADDING_ROWS = 1024
"""Embedding rows beyond the tokenizer's that large models carry to round their size up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    r"""The strings that open a role's turn, and the token that ends one.

    Example: ChatML is `Roles(user="<|im_start|>user\n", env="\n<|im_start|>user\n",
    agent="\n<|im_start|>assistant\n", end="<|im_end|>")`.
    """

    user: str
    """Opens the task's text, at the start of an episode."""
    agent: str
    """Opens the agent's turn."""
    env: str
    """Opens an observation."""
    end: str
    """Ends every turn; one token."""

    def save(self, directory: Path) -> None:
        """Write `renderer.json` into a model directory."""
        (directory / ROLES_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read `renderer.json` of a model directory.

        Raises:
            CheckpointError: It is missing or malformed.
        """
        found = read_json(directory / ROLES_FILE)
        names = {field.name for field in fields(cls)}
        if set(found) != names or not all(isinstance(value, str) for value in found.values()):
            raise CheckpointError(
                field=str(directory / ROLES_FILE),
                rule=f"an object of the strings {', '.join(sorted(names))}",
                value=found,
            )
        return cls(**found)


class Renderer:
    """Renders the turns of an episode for one model's tokenizer.

    Args:
        tokenizer: The model's tokenizer.
        roles: Markers of the turns, in that tokenizer's special tokens.

    Raises:
        CheckpointError: The end-of-turn marker is not one token of this tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, roles: Roles) -> None:
        self._tokenizer = tokenizer
        self._words = (
            tokenizer.get_vocab(with_added_tokens=False)
            if isinstance(tokenizer.model, WordLevel)
            else None
        )
        end = tokenizer.token_to_id(roles.end)
        if end is None:
            raise CheckpointError(field="end of turn", rule="a token", value=roles.end)
        self._end: int = end
        tokenizer.encode_special_tokens = False
        self._user, self._agent, self._env = (
            tokenizer.encode(marker, add_special_tokens=False).ids
            for marker in (roles.user, roles.agent, roles.env)
        )
        tokenizer.encode_special_tokens = True

    @classmethod
    def load(cls, directory: Path) -> Self:
        """The renderer of a model directory: by `renderer.json`, else by its chat template.

        Raises:
            CheckpointError: `tokenizer.json` is missing or malformed, or the roles are, or the chat
                template is of a form that has no roles.
        """
        tokenizer = load_tokenizer(directory)
        return cls(tokenizer, find_roles(directory, tokenizer))

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer, special ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def closed_vocabulary(self) -> bool:
        """Whether words outside the vocabulary exist (word-level) or any text can be rendered."""
        return self._words is not None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids at which the engine stops sampling a turn."""
        return (self._end,)

    def start(self, text: str) -> array[int]:
        """Ids of the task's text, up to and including the opening of the agent's first turn.

        Raises:
            DataError: A word is not in a closed vocabulary.
        """
        return self._turn(self._user, text)

    def observe(self, text: str) -> array[int]:
        """Ids to append after a sampled action, up to the opening of the agent's next turn.

        The action must have ended itself (see `ended`): an end that the policy did not sample is
        never added, so an action that was cut ends its episode.

        Raises:
            DataError: A word is not in a closed vocabulary.
        """
        return self._turn(self._env, text)

    def act(self, text: str) -> array[int]:
        """Ids of an action as a policy would sample it, its end included (for demonstrations).

        Raises:
            DataError: A word is not in a closed vocabulary.
        """
        return array("i", [*self._encode(text), self._end])

    def ended(self, ids: Sequence[int]) -> bool:
        """Whether a sampled action ended itself, rather than being cut."""
        return len(ids) > 0 and ids[-1] == self._end

    def action_text(self, ids: Sequence[int]) -> str:
        """Text of a sampled action without its final end token.

        Special tokens inside stay visible, so that the environment sees an invalid action.
        """
        body = ids[:-1] if self.ended(ids) else ids
        return str(self._tokenizer.decode(list(body), skip_special_tokens=False))

    def unknown(self, text: str) -> list[str]:
        """Words of a text that a closed vocabulary does not hold; empty for an open one."""
        if self._words is None:
            return []
        return [word for word in text.split() if word not in self._words]

    def _turn(self, opening: list[int], text: str) -> array[int]:
        return array("i", [*opening, *self._encode(text), self._end, *self._agent])

    def _encode(self, text: str) -> list[int]:
        unknown = self.unknown(text)
        if unknown:
            raise DataError(field="text", rule="made of known words", value=unknown[0])
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def check(directory: Path, required_words: Iterable[str]) -> None:
    """Refuse a tokenizer that does not fit its model or the environment.

    Args:
        directory: Model directory.
        required_words: Words that the environment says or the agent must be able to say.

    Raises:
        CheckpointError: The model and the tokenizer differ in vocabulary size, or a word is
            missing from a closed vocabulary.
    """
    renderer = Renderer.load(directory)
    rows = read_json(directory / _CONFIG_FILE).get("vocab_size")
    tokens = renderer.vocab_size
    spare = 0 if renderer.closed_vocabulary else _PADDING_ROWS
    if not isinstance(rows, int) or not tokens <= rows <= tokens + spare:
        raise CheckpointError(
            field=f"{directory}: vocab_size of the model",
            rule=f"that of its tokenizer ({tokens})",
            value=rows,
        )
    missing = renderer.unknown(" ".join(required_words))
    if missing:
        raise CheckpointError(
            field=f"{directory}: vocabulary",
            rule="one that holds every word of the environment",
            value=f"no {missing[0]!r} ({len(missing)} missing)",
        )


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory.

    Raises:
        CheckpointError: `tokenizer.json` is missing or malformed.
    """
    text = read_text(directory / _TOKENIZER_FILE)
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the package raises nothing narrower
        raise CheckpointError(
            field=str(directory / _TOKENIZER_FILE), rule="a tokenizer", value=str(error)
        ) from None


def find_roles(directory: Path, tokenizer: Tokenizer) -> Roles:
    """The roles of a model directory: those of `renderer.json`, else of its chat template.

    Raises:
        CheckpointError: It has neither, or they are malformed or of a form that has no roles.
    """
    template = find_template(directory)
    if template is None or (directory / ROLES_FILE).exists():
        return Roles.load(directory)
    user, agent, env, end = derive_markers(*template, tokenizer)
    return Roles(user=user, agent=agent, env=env, end=end)
