import io

from rich.console import Console

from trueup.reports.live import LiveView, final_table
from trueup.reports.summary import summarise
from trueup.training.progress import Progress


def snapshot(step, **more):
    known = {"reward": 0.5, "mean_lag": 1.25, "max_lag": 2, "mean_abs_gap": 0.03, "ess": 0.97}
    return Progress(step=step, version=step, **(known | more))


def console(*, terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)


def test_without_a_terminal_each_step_is_one_plain_line():
    out = console(terminal=False)
    with LiveView(3, console=out) as view:
        view.update(Progress(step=0, version=0, phase="sampling"))
        view.update(snapshot(1, who_waits="for episodes"))
        view.update(snapshot(1, phase="publishing"))
        view.update(snapshot(2, episodes_per_s=12.34))
    assert out.file.getvalue().splitlines() == [
        "step 1/3  reward 0.500  lag 1.25 / 2  gap 0.0300  ess 0.970  waits for episodes",
        "step 2/3  reward 0.500  lag 1.25 / 2  gap 0.0300  ess 0.970  eps/s 12.3",
    ]


def test_on_a_terminal_the_last_eight_steps_stand():
    out = console(terminal=True)
    with LiveView(20, console=out) as view:
        for step in range(1, 13):
            view.update(snapshot(step, reward=step / 100, running=7, who_waits="nobody waits"))
    picture = out.file.getvalue().split("12/20")[-1]
    assert "0.120" in picture
    assert "0.050" in picture
    assert "0.040" not in picture
    assert "7 episodes in flight" in picture
    assert "nobody waits" in picture


def test_only_a_picture_with_a_step_is_left_standing():
    erased = "\x1b[2K"
    for steps in (0, 1):
        out = console(terminal=True)
        with LiveView(3, console=out) as view:
            view.update(Progress(step=0, version=0, phase="preparing"))
            for step in range(steps):
                view.update(snapshot(step + 1))
        after_last_picture = out.file.getvalue().rpartition("version ")[2]
        assert (erased in after_last_picture) == (steps == 0)


def test_text_of_the_run_is_no_markup_and_no_escape_sequence():
    for terminal in (False, True):
        out = console(terminal=terminal)
        with LiveView(1, console=out) as view:
            view.update(snapshot(1, who_waits="[red]a[/red]\x1b[31m", phase="\x1b]0;title\x07"))
        assert "[red]a[/red]␛[31m" in out.file.getvalue()
        assert "\x1b[31m" not in out.file.getvalue()
        assert "\x1b]0;" not in out.file.getvalue()


def test_the_final_table_shows_before_and_after(simulated):
    out = console(terminal=False)
    out.print(final_table(summarise(simulated(steps=4))))
    shown = out.file.getvalue()
    assert "0.15 → 0.86" in shown
    assert "4" in shown
    assert "5 environment/worker_lost" in shown


def test_the_final_table_of_an_empty_run_has_no_figures(writer):
    out = console(terminal=False)
    out.print(final_table(summarise(writer().close())))
    assert "– → –" in out.file.getvalue()
    assert "demo (unfinished)" in out.file.getvalue()


def test_the_final_table_shows_reasons_as_text(writer):
    run = writer()
    run.issue(0, "a")
    hostile = ["engine", "[bold]x[/bold]\x1b[31m", ""]
    run.finish(1, "a", spans=[], reward=None, status="failed", failure=hostile)
    out = console(terminal=False)
    out.print(final_table(summarise(run.close())))
    assert "1 engine/[bold]x[/bold]␛[31m" in out.file.getvalue()


def test_on_a_narrow_terminal_only_the_words_give_way():
    out = Console(file=io.StringIO(), force_terminal=True, width=72, color_system=None)
    with LiveView(9, console=out) as view:
        view.update(snapshot(1, episodes_per_s=88.1, who_waits="trainer waits for " + "x" * 60))
    rows = [line for line in out.file.getvalue().splitlines() if "0.0300" in line]
    assert rows
    assert all("88.1" in row and "0.970" in row and "…" in row for row in rows)
