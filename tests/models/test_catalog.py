import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from support.gguf_file import WORDS, small_llama, write_gguf
from trueup.errors import CheckpointError
from trueup.models.catalog import MODELS, Golden, NamedModel, find, make, obtain
from trueup.models.chat import Renderer, Roles
from trueup.models.load import load_model
from trueup.models.package import PackagedFile

pytest.importorskip("gguf")

QUESTION = "Q?"
PROMPT = [
    1,
    *map(WORDS.index, "userĊQ?"),
    2,
    WORDS.index("Ċ"),
    1,
    *map(WORDS.index, "assistantĊ"),
]


def _mute_llama() -> tuple[LlamaForCausalLM, dict[int, float]]:
    """A model that answers the question with the end of its turn, and two of its logits."""
    model = small_llama(tied=False)
    with torch.inference_mode():
        state = model.model(input_ids=torch.tensor([PROMPT])).last_hidden_state[0, -1]
        head = model.lm_head.weight
        head.zero_()
        head[2] = state.bfloat16()
        head[7] = -head[2] / 2
        return model, {token: float(state @ head[token]) for token in (2, 7)}


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> NamedModel:
    """A catalogue entry whose file is not installed; its golden is of the model itself."""
    model, logits = _mute_llama()
    path = tmp_path_factory.mktemp("site") / "tiny.gguf"
    write_gguf(path, model)
    return NamedModel(
        name="tiny-named",
        source=PackagedFile(
            requirement="weights-of-a-catalogue-test==1",
            module="weights_of_a_catalogue_test",
            name=str(path),
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        ),
        golden=Golden(question=QUESTION, logits=logits, answer=""),
        license="Apache-2.0",
    )


@pytest.fixture
def catalogue(
    named: NamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, NamedModel]:
    """The entry with its package installed, and an empty cache."""
    package = tmp_path / "site" / named.source.module
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "tiny.gguf").write_bytes(Path(named.source.name).read_bytes())
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("TRUEUP_CACHE", str(tmp_path / "cache"))
    return {named.name: replace(named, source=replace(named.source, name="tiny.gguf"))}


def test_a_named_model_is_made_once_into_the_cache(
    catalogue: dict[str, NamedModel], tmp_path: Path
):
    assert find("tiny-named", models=catalogue) is None
    made = obtain("tiny-named", models=catalogue)
    assert made.parent == tmp_path / "cache"
    assert find("tiny-named", models=catalogue) == made
    before = (made / "model.safetensors").stat().st_mtime_ns
    assert obtain("tiny-named", models=catalogue) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    assert list(Renderer.load(made).start(QUESTION)) == PROMPT
    assert Roles.load(made).end == "<|im_end|>"
    assert load_model(made).dtype == torch.float32


def test_a_damaged_entry_is_made_again(catalogue: dict[str, NamedModel]):
    made = obtain("tiny-named", models=catalogue)
    weights = made / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert find("tiny-named", models=catalogue) is None
    assert obtain("tiny-named", models=catalogue) == made
    assert weights.read_bytes() == whole


def test_another_source_has_another_entry(named: NamedModel, tmp_path: Path):
    other = replace(named, source=replace(named.source, sha256="0" * 64))
    assert other.directory(tmp_path) != named.directory(tmp_path)


def test_a_model_with_other_logits_is_refused_and_not_kept(named: NamedModel, tmp_path: Path):
    shifted = {token: logit + 0.05 for token, logit in named.golden.logits.items()}
    wrong = replace(named, golden=replace(named.golden, logits=shifted))
    with pytest.raises(CheckpointError, match="logits must be"):
        make(wrong, Path(named.source.name), tmp_path / "made")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_answers_otherwise_is_refused(named: NamedModel, tmp_path: Path):
    wrong = replace(named, golden=replace(named.golden, answer="A"))
    with pytest.raises(CheckpointError, match=r"answer to 'Q\?' must be A"):
        make(wrong, Path(named.source.name), tmp_path / "made")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_itself_and_an_unknown_name_has_a_suggestion(tmp_path: Path):
    assert find(str(tmp_path)) == tmp_path
    with pytest.raises(CheckpointError, match=r"did you mean smollm2-135m\?\), got 'smolm2-135'"):
        find("smolm2-135")
    with pytest.raises(CheckpointError, match=r"tiny-agent or one of smollm2-135m, got '/nowhere'"):
        find("/nowhere")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The real one, where `make models` has made it."""
    found = find("smollm2-135m")
    if found is None:
        pytest.skip("smollm2-135m is not in the cache: make models")
    return found


@pytest.mark.extra
@pytest.mark.parametrize("text", ["What is 12 + 345?", "Grüße!", "def f(x):\n    return x  # 10"])
def test_turns_of_smollm2_are_what_its_template_renders_system_prompt_included(
    smollm2: Path, text: str
):
    from transformers import AutoTokenizer

    renderer = Renderer.load(smollm2)
    tokenizer = AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
    messages = [{"role": "user", "content": text}]
    first = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert list(renderer.start(text)) == first
    messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": text}]
    second = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert [*first, *renderer.act("Yes."), *renderer.observe(text)] == second


@pytest.mark.extra
def test_smollm2_says_that_the_capital_of_france_is_paris(smollm2: Path):
    renderer, model = Renderer.load(smollm2), load_model(smollm2, dtype=torch.bfloat16)
    ids = torch.tensor([list(renderer.start("What is the capital of France?"))])
    said = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )[0, ids.shape[1] :]
    assert renderer.action_text(said.tolist()) == MODELS["smollm2-135m"].golden.answer
    assert renderer.ended(said.tolist())
