"""The recipe for a language model, on a small one: text in, byte-level tokens, a graded number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.chat_model import chat_model
from support.live_runs import events, last_checkpoint, metrics, trained
from trueup import config
from trueup.environments.arithmetic_problems import HELDOUT
from trueup.models.chat import Renderer
from trueup.recipes.table import text
from trueup.records.audit import audit
from trueup.records.directory import RunDirectory
from trueup.reports.summary import summarise
from trueup.training.run import train

pytestmark = pytest.mark.timeout(300)

_SMALL = (
    "train.steps=3",
    "train.groups_per_step=2",
    "train.lr=1e-3",
    "train.threads=1",
    "engine.threads=1",
    "eval.samples=1",
    "sandbox.kind=bwrap",
)
"""No sandbox is started: the kind that is named need not work on the machine of the test."""


def run_recipe(root: Path, name: str, *overrides: str) -> RunDirectory:
    model = chat_model(root / f"{name}-model")
    chosen = [f'model.path="{model}"', *_SMALL, *overrides]
    settings = config.load(text("smollm-arithmetic"), chosen)
    assert train(settings, root, name).status == "done"
    return RunDirectory.open(root / name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return run_recipe(tmp_path_factory.mktemp("text"), "run")


def test_what_was_sampled_is_what_was_graded(run: RunDirectory) -> None:
    """A turn ends in the end token and its text, read back from the ids, has the reward."""
    renderer = Renderer.load(run.path.parent / "run-model")
    seen = set()
    for row in trained(run):
        action = [i for i, flag in zip(row["token_ids"], row["action"], strict=True) if flag]
        said = renderer.action_text(action)
        if not renderer.ended(action) or not any(c in "0123456789" for c in said):
            assert row["reward"] == 0.0
        seen.add(row["reward"])
        prompt = row["token_ids"][: row["action"].index(1)]
        assert renderer.action_text(prompt).endswith("\nA:<|im_end|>\n<|im_start|>assistant\n")
    assert len(seen) > 1


def test_the_engine_gets_bfloat16_and_the_trainer_keeps_float32(run: RunDirectory) -> None:
    weights = load_file(last_checkpoint(run) / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    elements = sum(tensor.numel() for tensor in weights.values())
    published = events(run, "publish")
    assert [event.payload["nbytes"] for event in published] == [2 * elements] * len(published)
    assert all(event.payload["n_changed"] > 0 for event in published[1:])
    assert {span["precision"] for row in trained(run) for span in row["spans"]} == {"bfloat16"}


def test_every_record_holds_together(run: RunDirectory) -> None:
    assert audit(run) == []
    found = metrics(run)
    assert all(found[step, "gap/scored"].sum > 0 for step in range(3))


def test_the_gain_is_that_of_the_heldout_problems(run: RunDirectory) -> None:
    first, *_, last = events(run, "eval")
    assert first.payload["episodes"] == last.payload["episodes"] == HELDOUT
    gain = summarise(run.path).gain
    assert gain is not None
    assert gain.tasks == HELDOUT
    rates = [event.payload["heldout_pass_rate"] for event in (first, last)]
    assert gain.mean == pytest.approx(rates[1] - rates[0])


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["int8", "fp8_row"])
def test_a_quantised_engine_fits_its_grid_to_float32_weights(tmp_path: Path, grid: str) -> None:
    run = run_recipe(tmp_path, "run", f"engine.quantize={grid}")
    weights = load_file(last_checkpoint(run) / "model.safetensors")
    elements = sum(tensor.numel() for tensor in weights.values())
    assert {event.payload["nbytes"] for event in events(run, "publish")} == {4 * elements}
    assert {span["precision"] for row in trained(run) for span in row["spans"]} == {
        f"bfloat16+{grid}"
    }
    assert audit(run) == []
