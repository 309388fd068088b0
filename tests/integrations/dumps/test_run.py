import pytest

from support.run_writer import RunWriter, episode_row
from trueup.corrections.whatif import Replay
from trueup.errors import RunDirectoryError, UsageError
from trueup.integrations.dumps.formats import read
from trueup.records.tokens import write_step


@pytest.fixture
def run(tmp_path):
    writer = RunWriter(
        root=tmp_path,
        overrides=(
            "train.advantage=group",
            "train.zero_variance=keep",
            "schedule.consume=mask",
            "schedule.staleness=1",
            "correction.denominator=kept",
        ),
    )
    for step in (0, 1):
        rows = [
            episode_row(
                f"e{step}", group=3, reward=1.0, version=step, step_version=step + 1, staleness=0.25
            ),
            episode_row(f"f{step}", group=3, reward=0.0, version=step, step_version=step + 1),
            episode_row(f"g{step}", group=9, reward=0.0, trained=False),
        ]
        write_step(writer.directory, step, rows)
    return writer.close()


def test_a_run_gives_what_each_step_consumed_under_its_own_rules(run):
    dump = read(run)
    assert (dump.source, dump.steps, dump.engines) == ("run", (0, 1), ("engine-0",))
    assert dump.replay == Replay(
        advantage="group", zero_variance="keep", denominator="kept", max_lag=1
    )
    first, second = dump.batches
    assert first.num_episodes == 2  # what was dropped is not a part of the step batch
    assert first.segment_offsets.tolist() == [0, 4, 8]
    assert first.reward.tolist() == [1.0, 0.0]
    assert first.group.tolist() == [0, 0]
    assert first.lag.tolist() == second.lag.tolist() == [1] * 8
    assert (first.version.tolist(), second.version.tolist()) == ([0] * 8, [1] * 8)
    assert first.log_ratio.tolist() == pytest.approx([0.25] * 4 + [0.0] * 4)
    assert first.turn is not None
    assert first.turn.tolist() == [0] * 8
    assert first.logp_version is not None
    staleness = first.logp_target - first.logp_version
    assert staleness.tolist() == pytest.approx([0.25] * 4 + [0.0] * 4)
    assert (dump.missing, dump.notes) == ((), ())


def test_steps_can_be_chosen(run):
    assert read(run, steps=range(1, 5)).steps == (1,)
    with pytest.raises(UsageError, match="--steps must be steps that the run has written"):
        read(run, steps=range(5, 9))


def test_what_is_called_a_run_must_be_one(tmp_path):
    with pytest.raises(RunDirectoryError):
        read(tmp_path, kind="run")
