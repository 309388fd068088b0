from pathlib import Path

import pytest
import torch

from support.embedded import copied, tiny
from trueup.errors import CheckpointError
from trueup.models.load import state_tensors
from trueup.records.directory import RunDirectory
from trueup.training import checkpoint
from trueup.training.resume import STATE as STATE_FILE
from trueup.training.resume import newest_valid, read_state

STATE = {"step": 3, "version": 2, "stream": {"low_water": 5, "committed": [7]}}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "run")


def adam(model) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def teach(model, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(input_ids=torch.arange(step, step + 4)[None]).logits.logsumexp(-1).sum().backward()
        optimizer.step()


def saved(run: RunDirectory, model, optimizer, step: int = 3) -> str:
    return checkpoint.save(
        run.checkpoint(step), model, optimizer, STATE, tokenizer_files_from=run.path
    )


def test_training_goes_on_bit_for_bit_from_a_checkpoint(run: RunDirectory):
    model = tiny(seed=1)
    optimizer = adam(model)
    teach(model, optimizer, 3)
    saved(run, model, optimizer)
    teach(model, optimizer, 2)

    again, moments = checkpoint.load(run.checkpoint(3))
    restored = adam(again)
    checkpoint.restore_optimizer(again, restored, moments)
    teach(again, restored, 2)
    ours = copied(model)
    for name, tensor in state_tensors(again).items():
        assert torch.equal(tensor, ours[name]), name
    for name, parameter in again.named_parameters():
        theirs = optimizer.state[dict(model.named_parameters())[name]]
        for key, value in restored.state[parameter].items():
            assert torch.equal(value, theirs[key]), (name, key)


def test_forgetting_the_moments_would_be_noticed(run: RunDirectory):
    model = tiny(seed=1)
    optimizer = adam(model)
    teach(model, optimizer, 3)
    saved(run, model, optimizer)
    teach(model, optimizer, 2)
    again, _ = checkpoint.load(run.checkpoint(3))
    teach(again, adam(again), 2)
    ours = copied(model)
    assert any(not torch.equal(t, ours[name]) for name, t in state_tensors(again).items())


def test_an_optimiser_that_took_no_step_has_no_moments(run: RunDirectory):
    model = tiny()
    saved(run, model, adam(model))
    again, moments = checkpoint.load(run.checkpoint(3))
    optimizer = adam(again)
    checkpoint.restore_optimizer(again, optimizer, moments)
    assert optimizer.state_dict()["state"] == {}


def test_the_state_comes_back_and_the_digest_names_the_content(run: RunDirectory):
    model = tiny()
    optimizer = adam(model)
    first = saved(run, model, optimizer)
    assert read_state(run.checkpoint(3)) == STATE
    assert newest_valid(run) == (run.checkpoint(3), [])
    assert saved(run, model, optimizer) == first
    teach(model, optimizer, 1)
    assert saved(run, model, optimizer) != first


@pytest.mark.parametrize("name", [checkpoint.OPTIMIZER, STATE_FILE, "model.safetensors"])
def test_a_flipped_byte_in_any_part_is_found(run: RunDirectory, name: str):
    model = tiny()
    optimizer = adam(model)
    teach(model, optimizer, 1)
    saved(run, model, optimizer)
    path = run.checkpoint(3) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=name):
        checkpoint.load(run.checkpoint(3))
    with pytest.raises(CheckpointError, match="at least one that verifies"):
        newest_valid(run)


def test_only_the_newest_are_kept(run: RunDirectory):
    for step in (1, 2, 9, 10, 11):
        run.checkpoint(step).mkdir()
    checkpoint.retain(run, 2)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-000010", "step-000011"]
    checkpoint.retain(run, 5)
    assert len(list(run.checkpoints.iterdir())) == 2


def test_the_reference_of_a_penalty_comes_back_and_its_absence_is_an_error(run: RunDirectory):
    model, start = tiny(seed=1), copied(tiny(seed=2))
    checkpoint.save(
        run.checkpoint(1), model, adam(model), STATE, tokenizer_files_from=run.path, reference=start
    )
    saved(run, model, adam(model), 2)
    found = checkpoint.load_reference(run.checkpoint(1))
    assert found.keys() == start.keys()
    assert all(torch.equal(tensor, start[name]) for name, tensor in found.items())
    with pytest.raises(CheckpointError, match=r"step-000002/reference\.safetensors"):
        checkpoint.load_reference(run.checkpoint(2))
