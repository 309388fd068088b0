import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trueup.errors import CheckpointError
from trueup.models.chat import Renderer, Roles, find_roles

SPECIALS = [
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]",
]  # fmt: skip

CHATML = """{% for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA3 = """{{ bos_token }}{% for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' -}}
{% endfor %}{% if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}{% for m in messages %}
{%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
{{- '<start_of_turn>' + role + '\n' + m['content'] + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% for m in messages %}
{%- if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}
{%- else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"""
NO_TOKENS = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}assistant: "
LAST_TURN_DIFFERS = CHATML.replace("m.content", "m.content + ('!' if loop.index == 3 else '')")


def _model(directory: Path, template: str | None, **settings: str) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def _roles(directory: Path) -> Roles:
    return find_roles(directory, Tokenizer.from_file(str(directory / "tokenizer.json")))


@pytest.mark.parametrize(
    ("template", "bos", "roles"),
    [
        (
            CHATML,
            "",
            Roles(
                user="<|im_start|>user\n",
                agent="\n<|im_start|>assistant\n",
                env="\n<|im_start|>user\n",
                end="<|im_end|>",
            ),
        ),
        (
            LLAMA3,
            "<|begin_of_text|>",
            Roles(
                user="<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n",
                agent="<|start_header_id|>assistant<|end_header_id|>\n\n",
                env="<|start_header_id|>user<|end_header_id|>\n\n",
                end="<|eot_id|>",
            ),
        ),
        (
            GEMMA,
            "<bos>",
            Roles(
                user="<bos><start_of_turn>user\n",
                agent="\n<start_of_turn>model\n",
                env="\n<start_of_turn>user\n",
                end="<end_of_turn>",
            ),
        ),
    ],
    ids=["chatml", "llama-3", "gemma"],
)
def test_the_markers_of_a_template_are_its_roles(
    template: str, bos: str, roles: Roles, tmp_path: Path
):
    assert _roles(_model(tmp_path, template, bos_token=bos)) == roles


def test_a_default_system_prompt_belongs_to_the_first_turn(tmp_path: Path):
    system = "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}"
    roles = _roles(_model(tmp_path, system + CHATML))
    assert roles.user == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"
    assert roles.env == "\n<|im_start|>user\n"


def test_turns_have_the_ids_that_the_template_gives(tmp_path: Path):
    from transformers import AutoTokenizer

    renderer = Renderer.load(_model(tmp_path, LLAMA3, bos_token="<|begin_of_text|>"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    said = ["What is 12 + 30?", "42.", "And 1 more?"]
    messages = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant", "user"), said, strict=True)
    ]
    for turns, ids in (
        (1, renderer.start(said[0])),
        (3, renderer.start(said[0]) + renderer.act(said[1]) + renderer.observe(said[2])),
    ):
        rendered = tokenizer.apply_chat_template(messages[:turns], add_generation_prompt=True)
        assert list(ids) == rendered["input_ids"]


def test_a_template_inside_the_tokenizers_settings_counts(tmp_path: Path):
    assert _roles(_model(tmp_path, None, chat_template=CHATML)).end == "<|im_end|>"


def test_written_roles_come_before_the_template(tmp_path: Path):
    directory = _model(tmp_path, CHATML)
    written = Roles(user="<s>", agent="<s>", env="<s>", end="</s>")
    written.save(directory)
    assert _roles(directory) == written


def test_a_directory_with_neither_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"renderer\.json"):
        _roles(_model(tmp_path, None))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (MISTRAL, "ends every turn with the same special token"),
        (NO_TOKENS, "ends every turn with the same special token"),
        (LAST_TURN_DIFFERS, "made of the same markers in every turn"),
        ("{{ raise_exception('system only') }}", "renders user and assistant turns.*system only"),
        ("{% for m in", "a template .or"),
        ("{{ messages.none.at.all }}", "renders user and assistant turns"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "renders user and assistant turns"),
        ("{{ messages.append(1) }}", "renders user and assistant turns"),
    ],
)
def test_other_templates_are_refused_with_what_to_do(template: str, message: str, tmp_path: Path):
    with pytest.raises(CheckpointError, match=rf"chat template must be .*{message}") as caught:
        _roles(_model(tmp_path, template))
    assert "renderer.json" in str(caught.value)
