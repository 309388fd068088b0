import pytest

from trueup.records.tokens import write_step
from trueup.reports.html import render_report
from trueup.reports.run import read_run
from trueup.reports.selection import ALARM, selection, selection_table


def stages(path):
    return {stage.name: stage for stage in selection(path, read_run(path).history)}


def launch(run, name, *, tokens, reward, task="a", seconds=1.0):
    run.issue(0.0, name, task=task)
    run.finish(
        1.0,
        name,
        spans=[[0, "engine-0", 0, tokens]],
        reward=reward,
        turns=2,
        t_start=0.0,
        t_end=seconds,
    )


def consume(run, names):
    run.add(2.0, "claim", group=0, version=0, step=0, episodes=names)
    run.add(3.0, "train", version=1, step=0, t0=2.0, t1=3.0, phases={})
    run.add(3.0, "commit", version=1, step=0, episodes=names)


def test_every_stage_has_the_means_of_its_episodes(writer, row):
    run = writer()
    launch(run, "short", tokens=2, reward=1.0)
    launch(run, "long", tokens=6, reward=0.0, seconds=3.0)
    launch(run, "late", tokens=20, reward=0.5, task="hard", seconds=9.0)
    run.issue(0.0, "lost", task="hard")
    consume(run, ["short", "long"])
    write_step(run.directory, 0, [row("short"), row("long", keep=False)])
    found = stages(run.close())
    assert [found[n].episodes for n in ("launched", "finished", "consumed", "kept")] == [4, 3, 2, 1]
    # difficulty of a: 1 − (1 + 0)/2; of hard: 1 − .5
    assert found["launched"].difficulty.mean == pytest.approx(0.5)
    assert found["launched"].tokens.mean is None  # of what runs still, nobody knows
    assert found["finished"].tokens.mean == pytest.approx(28 / 3)
    assert found["consumed"].tokens.mean == 4
    assert found["consumed"].seconds.mean == 2
    assert found["consumed"].reward.mean == 0.5
    assert (found["kept"].tokens.mean, found["kept"].reward.mean) == (2, 1)
    assert found["kept"].turns.mean == 2


def test_a_loop_that_drops_the_long_is_marked(writer):
    run = writer()
    short = [f"s{i}" for i in range(20)]
    for i, name in enumerate(short):
        launch(run, name, tokens=10 + i % 3, reward=i % 2)
    for i in range(10):
        launch(run, f"l{i}", tokens=100 + i % 3, reward=i % 2)
    consume(run, short)
    longer = [f"l{i}" for i in range(10)]
    run.add(3.0, "drop", group=1, version=1, reason="stale", episodes=longer)
    path = run.close()
    consumed = stages(path)["consumed"]
    assert consumed.tokens.z < -ALARM
    assert abs(consumed.reward.z) < 1
    table = selection_table(list(stages(path).values()))
    assert f"({consumed.tokens.z:+.0f} SE)" in table
    assert table in render_report(path)


@pytest.mark.parametrize("reason", ["run_end", "resume", None])
def test_what_a_run_did_not_come_to_is_not_lost(writer, reason):
    run = writer()
    short = [f"s{i}" for i in range(20)]
    for i, name in enumerate(short):
        launch(run, name, tokens=10 + i % 3, reward=i % 2)
    for i in range(10):
        launch(run, f"l{i}", tokens=100 + i % 3, reward=i % 2)
    consume(run, short)
    if reason is not None:
        longer = [f"l{i}" for i in range(10)]
        run.add(3.0, "drop", group=1, version=1, reason=reason, episodes=longer)
    assert stages(run.close())["consumed"].tokens.z is None


def test_what_was_selected_without_loss_is_not_marked(simulated):
    path = simulated(steps=6)
    assert "SE)" not in selection_table(selection(path, read_run(path).history))


def test_an_empty_run_says_so(writer):
    assert "nothing was launched" in render_report(writer().close())
