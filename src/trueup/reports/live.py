"""Shows a run while it trains: a progress bar, the last steps, and who waits for whom.

On a terminal the picture is redrawn in place; elsewhere each new step is one plain line, so that a
log file stays a log file. Text of the run is shown as text: no markup, no escape sequence.
"""

from __future__ import annotations

from collections import deque
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from trueup.reports.markup import visible
from trueup.reports.summary import Summary
from trueup.training.progress import Progress as Snapshot

ROWS = 8
HEADINGS = ("step", "reward", "lag mean/max", "|gap| nats", "ESS", "episodes/s", "waiting")


class LiveView:
    """A context manager that is fed with snapshots.

    Example:
        with LiveView(total_steps=40) as view:
            await controller.run(on_progress=view.update)
    """

    def __init__(self, total_steps: int, *, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._rows: deque[Snapshot] = deque(maxlen=ROWS)
        self._now = Snapshot(step=0, version=0)
        self._bar = Progress(
            TextColumn("step"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task("", total=total_steps)
        self._total = total_steps
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(self._picture(), console=self._console, refresh_per_second=4)

    def __enter__(self) -> LiveView:
        """Start drawing."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the last picture standing, if it shows a step."""
        if self._live is not None:
            self._live.transient = not self._rows
            self._live.update(self._picture())
            self._live.stop()

    def update(self, progress: Snapshot) -> None:
        """Show a snapshot; one that only changes the phase of a step adds no row."""
        new_step = progress.step > self._now.step
        self._now = progress
        if new_step:
            self._rows.append(progress)
        self._bar.update(self._task, completed=progress.step)
        if self._live is not None:
            self._live.update(self._picture())
        elif new_step:
            self._console.print(self._line(progress), soft_wrap=True)

    def _picture(self) -> Group:
        table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
        *figures, words = HEADINGS
        for heading in figures:
            table.add_column(heading, justify="right", no_wrap=True)
        # The one column that gives way on a narrow terminal; its cells stay on one line.
        table.add_column(words)
        for row in self._rows:
            *cells, waits = map(_text, _cells(row))
            waits.no_wrap, waits.overflow = True, "ellipsis"
            table.add_row(*cells, waits)
        return Group(self._bar, table, self._status())

    def _status(self) -> Text:
        now = self._now
        status = Text(f"version {now.version}", style="bold")
        for words in (
            visible(now.phase),
            f"{now.running} episodes in flight",
            f"{now.waiting_groups} groups wait for the trainer",
            visible(now.who_waits),
        ):
            if words:
                status.append("  ·  ", style="dim").append(words, style="not bold")
        return status

    def _line(self, now: Snapshot) -> Text:
        names = ("reward", "lag", "gap", "ess", "eps/s", "waits")
        cells = zip(names, _cells(now)[1:], strict=True)
        parts = [f"{name} {cell}" for name, cell in cells if cell]
        return Text("  ".join([f"step {now.step}/{self._total}", *parts]))


def final_table(summary: Summary) -> Table:
    """The end result of a run, for printing."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="left")
    for name, value in _results(summary):
        table.add_row(_text(name), _text(value))
    return table


def _results(s: Summary) -> list[tuple[str, str]]:
    before, after = _number(s.base_pass_rate, ".2f"), _number(s.heldout_pass_rate, ".2f")
    reads = f"{_number(s.base_reads_per_episode, '.2f')} → {_number(s.reads_per_episode, '.2f')}"
    rows = [
        ("run", f"{s.run} ({s.ended})"),
        ("held-out pass rate", f"{before} → {after}"),
        *([("gain", str(s.gain))] if s.gain is not None else []),
        ("reads per episode", reads),
        ("steps", f"{s.steps}"),
        ("episodes", f"{s.episodes_trained} trained of {s.episodes_launched} launched"),
        ("throughput", f"{_number(s.episodes_per_s, '.2f')} episodes/s over {s.wall_s:.1f} s"),
        (
            "token lag",
            f"mean {_number(s.mean_token_lag, '.2f')}, max {_number(s.max_token_lag, 'd')}",
        ),
    ]
    if s.overlap is not None:
        rows.append(("overlap", f"{s.overlap:.0%} of training time had engines decoding"))
    if s.waits is not None:
        rows.append(("waiting", s.waits.verdict))
    for title, counts in (("failures", s.failures), ("drops", s.drops)):
        if counts:
            rows.append((title, ", ".join(f"{n} {reason}" for reason, n in counts.items())))
    return rows


def _cells(s: Snapshot) -> tuple[str, ...]:
    lag = "" if s.mean_lag is None else f"{s.mean_lag:.2f} / {_number(s.max_lag, 'd')}"
    return (
        str(s.step),
        _number(s.reward, ".3f", missing=""),
        lag,
        _number(s.mean_abs_gap, ".4f", missing=""),
        _number(s.ess, ".3f", missing=""),
        _number(s.episodes_per_s, ".1f", missing=""),
        visible(s.who_waits),
    )


def _number(value: float | None, form: str, *, missing: str = "–") -> str:
    return missing if value is None else format(value, form)


def _text(words: str) -> Text:
    return Text(visible(words))
