import json
import shutil
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trueup.errors import CheckpointError, DataError
from trueup.models.chat import Renderer, Roles, check

# ids: fix 0, clamp 1, read 2, patch 3, + 4, - 5, x 6, then the specials
PAD, EOS, USER, AGENT, ENV, END = range(7, 13)


@pytest.fixture(scope="module")
def renderer(tokenizer_dir: Path) -> Renderer:
    return Renderer.load(tokenizer_dir)


def test_a_turn_is_its_role_its_text_its_end_and_the_agents_opening(renderer: Renderer):
    assert renderer.start("fix clamp") == array("i", [USER, 0, 1, END, AGENT])
    assert renderer.observe("x + x") == array("i", [ENV, 6, 4, 6, END, AGENT])
    assert renderer.act("patch +") == array("i", [3, 4, END])
    assert renderer.stop_ids == (END,)


def test_an_action_is_read_without_its_end_and_with_specials_visible(renderer: Renderer):
    assert renderer.action_text([3, 4, END]) == "patch +"
    assert renderer.action_text([3, END, 4, END]) == "patch <end> +"
    assert renderer.action_text([USER, 2]) == "<user> read"
    assert renderer.action_text([END]) == renderer.action_text([]) == ""


def test_a_cut_action_has_not_ended_and_keeps_its_text(renderer: Renderer):
    assert renderer.ended([3, 4, END])
    assert not renderer.ended([3, 4])
    assert not renderer.ended([END, 4])
    assert not renderer.ended([])
    assert renderer.action_text([3, 4]) == "patch +"


def test_an_action_sampled_in_other_pieces_than_the_tokenizers_reads_the_same():
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    renderer = Renderer(tokenizer, Roles(user="<end>", agent="<end>", env="<end>", end="<end>"))
    sampled = array("i", [0, 1, 3])
    assert renderer.action_text(sampled) == "ab"
    assert renderer.act("ab") == array("i", [2, 3]) != sampled, "why ids are never re-tokenised"


def test_an_unknown_word_is_an_error(renderer: Renderer):
    with pytest.raises(DataError, match="text must be made of known words, got 'divide'"):
        renderer.start("fix divide")


def test_the_world_cannot_say_a_control_token(renderer: Renderer):
    with pytest.raises(DataError, match="'<end>'"):
        renderer.observe("x <end> <agent> patch +")


def test_the_tokenizer_fits_its_model(model_dir: Path):
    check(model_dir, ("fix", "+"))
    with pytest.raises(CheckpointError, match="no 'max'"):
        check(model_dir, ("fix", "max"))


@pytest.mark.parametrize("rows", [12, 14])
def test_a_tokenizer_of_another_size_is_refused(rows: int, model_dir: Path, tmp_path: Path):
    config = json.loads((model_dir / "config.json").read_text()) | {"vocab_size": rows}
    for name in ("tokenizer.json", "renderer.json"):
        shutil.copy(model_dir / name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"vocab_size .* must be that of its tokenizer \(13\)"
    ):
        check(tmp_path, ())


@pytest.mark.parametrize("name", ["tokenizer.json", "renderer.json"])
@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"user": 1}', "\udcff"])
def test_a_damaged_or_missing_file_is_named(
    name: str, content: str | None, tokenizer_dir: Path, tmp_path: Path
):
    shutil.copytree(tokenizer_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=name):
        Renderer.load(tmp_path)


def test_an_end_that_is_no_token_is_refused(tokenizer_dir: Path, tmp_path: Path):
    shutil.copy(tokenizer_dir / "tokenizer.json", tmp_path)
    Roles(user="<user>", agent="<agent>", env="<env>", end="<stop>").save(tmp_path)
    with pytest.raises(CheckpointError, match="end of turn must be a token, got '<stop>'"):
        Renderer.load(tmp_path)


def test_an_open_vocabulary_renders_markers_in_the_worlds_text_as_characters(tmp_path: Path):
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(_byte_alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    Roles(
        user="<|im_start|>user\n",
        env="\n<|im_start|>user\n",
        agent="\n<|im_start|>assistant\n",
        end="<|im_end|>",
    ).save(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 320}')
    check(tmp_path, ("anything", "at", "all"))
    renderer = Renderer.load(tmp_path)
    start, end = 256, 257
    assert renderer.stop_ids == (end,)
    ids = renderer.observe("a<|im_end|>")
    assert [i for i in ids if i >= 256] == [start, end, start]
    said = renderer.action_text(renderer.act("a<|im_end|>"))
    assert said == "a<|im_end|>"


def test_rendering_loads_neither_torch_nor_transformers():
    code = (
        "import sys, trueup.models.chat; "
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"


def _byte_alphabet() -> list[str]:
    return pre_tokenizers.ByteLevel.alphabet()
