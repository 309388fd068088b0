"""The markers of an episode's turns, read off a tokenizer's chat template.

A template is rendered around texts that are known, so what stands between them are its markers. It
fits if every turn, the agent's and the world's, ends in the same one token: so it is with ChatML
(Qwen, SmolLM), Llama 3, Phi, Granite and Gemma, but not with Mistral. Whatever the template puts
before the first user turn, a default system prompt say, belongs to the opening of an episode: the
first turn then has exactly the ids that the template gives.

Templates are rendered in a sandbox that reaches nothing but the messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trueup.errors import CheckpointError
from trueup.models.directory import read_json, read_text

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

_TASK, _ACTION, _OBSERVATION = "first-text", "reply-text", "second-text"
"""What is rendered: found again in the output, and in no marker."""

Message = Mapping[str, str]


def find_template(directory: Path) -> tuple[str, dict[str, str]] | None:
    """The chat template of a model directory and the special tokens that it may name.

    Returns:
        None if the directory has no template.

    Raises:
        CheckpointError: `tokenizer_config.json` is no JSON object.
    """
    described = directory / TOKENIZER_CONFIG_FILE
    settings = read_json(described) if described.is_file() else {}
    path = directory / TEMPLATE_FILE
    source = read_text(path) if path.is_file() else settings.get("chat_template")
    if not isinstance(source, str):
        return None
    named = {name: _content(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
    return source, {name: token for name, token in named.items() if token is not None}


def derive_markers(
    source: str, tokens: Mapping[str, str], tokenizer: Tokenizer
) -> tuple[str, str, str, str]:
    """What opens the task's, the agent's and the world's turn, and the token that ends a turn.

    Args:
        source: The template.
        tokens: `bos_token` and the like, as `find_template` gives them.
        tokenizer: Says which strings are special tokens.

    Raises:
        CheckpointError: The template cannot be rendered, or is of another form.
    """
    template = _compile(source)

    def render(*texts: str) -> str:
        return _render(template, _conversation(texts), tokens)

    opening, _, after_task = render(_TASK).partition(_TASK)
    whole = render(_TASK, _ACTION, _OBSERVATION)
    after_action = whole.partition(_ACTION)[2].partition(_OBSERVATION)[0]
    end = _leading_token(after_task, tokenizer)
    if not end or not after_action.startswith(end):
        _refuse("one that ends every turn with the same special token", after_task)
    markers = opening, after_task.removeprefix(end), after_action.removeprefix(end), end
    user, agent, env, end = markers
    rebuilt = f"{user}{_TASK}{end}{agent}{_ACTION}{end}{env}{_OBSERVATION}{end}{agent}"
    if whole != rebuilt:
        _refuse("made of the same markers in every turn", whole)
    return markers


def _conversation(texts: Sequence[str]) -> list[Message]:
    return [
        {"role": "assistant" if index % 2 else "user", "content": text}
        for index, text in enumerate(texts)
    ]


def _compile(source: str) -> Template:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse_messages
    environment.filters["tojson"] = json.dumps
    try:
        return environment.from_string(source)
    except TemplateError as error:
        _refuse("a template", str(error))


def _render(template: Template, messages: Sequence[Message], tokens: Mapping[str, str]) -> str:
    from jinja2 import TemplateError

    try:
        return template.render(messages=messages, add_generation_prompt=True, **tokens)
    except (TemplateError, TypeError, ValueError) as error:
        _refuse("one that renders user and assistant turns", str(error))


def _refuse_messages(reason: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(reason)


def _leading_token(text: str, tokenizer: Tokenizer) -> str:
    """The special token that a text begins with; empty if none."""
    special = (token.content for token in tokenizer.get_added_tokens_decoder().values())
    return max((token for token in special if text.startswith(token)), key=len, default="")


def _content(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _refuse(rule: str, value: str) -> NoReturn:
    raise CheckpointError(
        field="chat template", rule=f"{rule} (or write renderer.json)", value=value
    )
