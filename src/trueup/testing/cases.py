"""The known failures C1-C27 as data: input, method, and the outcome that is right.

Each was reported against, or found by reading, a released system. To add one: an entry in `CASES`.
A case is a list of steps; every step must have its outcome.

Rows are written as their action tokens; `hidden` puts other positions between them. Log-probs of a
step that is given as d are such that target − behaviour = d.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import NormalDist
from typing import Literal

import torch

from trueup.testing.protocol import Arrays, Method, Run

NAN, LN = math.nan, math.log
Rows = Sequence[Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Want:
    """The outcome that is right. What is None is not asked for; finiteness always is."""

    weight: Rows | None = None
    """At the action tokens of each row; NaN where any weight will do."""
    keep: Sequence[Sequence[bool] | None] | None = None
    """At the action tokens of each row; None for a row where both are right."""
    advantage: Sequence[float] | None = None
    """Of the kept tokens of each row; NaN where any will do."""
    denominator: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    alarm: str | None = None
    """One of `ALARMS` that must be raised."""
    refused: bool = False
    """An error is the right answer."""
    corrected: bool = False
    """Refused, or weights that are not all 1."""
    as_step: int | None = None
    """Metrics equal to those of that step."""
    tolerance: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call of the correction and what must come of it."""

    arrays: Callable[[], Arrays]
    want: Want
    method: Method = field(default_factory=Method)
    run: Run = field(default_factory=Run)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One known failure."""

    number: str
    title: str
    steps: tuple[Step, ...]
    merged: Mapping[str, float] = field(default_factory=dict)
    """Metrics of all steps merged."""


def padded(
    target: Rows,
    behaviour: Rows,
    *,
    reward: Sequence[float] | None = None,
    hidden: Mapping[tuple[int, int], tuple[float, float]] | None = None,
    current: Rows | None = None,
) -> Arrays:
    """Rows of action tokens of one group, padded to the right with zeros.

    Args:
        target: log π_old by row.
        behaviour: log μ by row.
        reward: By row; 0, 1, 2, ... unless given.
        hidden: (row, position) -> log-probs of a token that is there but is no action.
        current: log π_θ by row.
    """
    hidden = hidden or {}
    width = max(map(len, behaviour), default=0) + len(hidden)
    shape = (len(behaviour), width)
    target_, behaviour_, current_ = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
    action = torch.zeros(shape, dtype=torch.bool)
    for i, row in enumerate(behaviour):
        places = [j for j in range(width) if (i, j) not in hidden][: len(row)]
        target_[i, places] = torch.tensor(target[i], dtype=torch.float32)
        behaviour_[i, places] = torch.tensor(row, dtype=torch.float32)
        if current is not None:
            current_[i, places] = torch.tensor(current[i], dtype=torch.float32)
        action[i, places] = True
    for (i, j), (of_target, of_behaviour) in hidden.items():
        target_[i, j], behaviour_[i, j] = of_target, of_behaviour
    return Arrays(
        target=target_,
        behaviour=behaviour_,
        action=action,
        reward=torch.tensor(reward if reward is not None else range(shape[0]), dtype=torch.float32),
        group=torch.zeros(shape[0], dtype=torch.int64),
        current=None if current is None else current_,
    )


def gaps(d: Rows, **kwargs: object) -> Arrays:
    """Rows with these log-ratios d; NaN: no behaviour log-prob."""
    target = [[min(x, 0.0) - 1 if x == x else -1.0 for x in row] for row in d]
    behaviour = [[-max(x, 0.0) - 1 if x == x else NAN for x in row] for row in d]
    return padded(target, behaviour, **kwargs)  # type: ignore[arg-type]


def _flat(length: int, rows: int) -> Arrays:
    """Rows whose Σ d are the quantiles of N(0, .05² · length): what `length` tokens come to."""
    normal = NormalDist(0, 0.05 * math.sqrt(length))
    sums = [normal.inv_cdf((i + 0.5) / rows) for i in range(rows)]
    d = (torch.tensor(sums) / length)[:, None].expand(rows, length)
    return Arrays(
        target=d.clamp(max=0) - 1,
        behaviour=-d.clamp(min=0) - 1,
        action=torch.ones_like(d, dtype=torch.bool),
        reward=torch.arange(rows).float(),
        group=torch.zeros(rows, dtype=torch.int64),
    )


def _many() -> Arrays:
    """More than 2^24 action tokens with |d| spread evenly over [0, 1]."""
    behaviour = torch.linspace(0, -1, 4097 * 4096).reshape(4097, 4096)
    return Arrays(
        target=torch.zeros_like(behaviour),
        behaviour=behaviour,
        action=torch.ones_like(behaviour, dtype=torch.bool),
        reward=torch.arange(4097).float(),
        group=torch.zeros(4097, dtype=torch.int64),
    )


def _bfloat16() -> Arrays:
    made = padded([[-12.34], [-1.0]], [[-12.31], [-1.0]])
    return replace(made, target=made.target.bfloat16(), behaviour=made.behaviour.bfloat16())


def _truncated() -> Arrays:
    """An unchanged policy .5, .3, .15, .05 sampled with top-p .9, which keeps the first three."""
    target = [[LN(p) for p in (0.5, 0.3, 0.15)]] * 2
    made = padded(target, [[x - LN(0.95) for x in row] for row in target])
    return replace(made, log_mass=torch.where(made.action, LN(0.95), 0.0))


def _ragged() -> Arrays:
    made = gaps([[0.1, 0.2], [0.1, 0.2]])
    return replace(made, behaviour=made.behaviour[:, :1])


BAND = Method(weight="band", low=0.5, high=5.0)
RAW = Method(weight="ratio")
PRODUCT_RATIO = Method(level="product", weight="ratio")
_C1 = partial(padded, [[-2.0] * 3] * 2, [[-1.0] * 3, [-2.5] * 3], reward=[100, 1])
_SPARSE = {(i, j): (-30.0, -0.5) for i in range(3) for j in (0, 2, 3, 5, 6, 8, 9)}
_DENOMINATORS: tuple[tuple[Literal["all", "kept"], float], ...] = (("kept", 60.0), ("all", 100.0))

CASES: tuple[Case, ...] = (
    Case(
        number="C1",
        title="a rejected row leaves its group's baseline",
        steps=(
            # Ratios e^-1 and e^.5: the group of one that is left has no contrast; never −49.5.
            Step(
                arrays=_C1,
                method=Method(level="geometric", weight="band", low=0.5, high=2.0),
                want=Want(keep=[[False] * 3, None], advantage=[NAN, 0.0]),
            ),
            Step(
                arrays=_C1,
                method=Method(level="product", weight="band", low=0.5, high=2.0),
                want=Want(keep=[[False] * 3] * 2),
            ),
        ),
    ),
    Case(
        number="C2",
        title="a token filter takes no reward with it",
        steps=(
            Step(
                arrays=partial(gaps, [[0.0, 0.1], [3.0, 0.0]], reward=[0, 1]),
                method=BAND,
                want=Want(keep=[[True, True], [False, True]], advantage=[-0.5, 0.5]),
            ),
        ),
    ),
    Case(
        number="C3",
        title="a row without action token leaves its peers' baseline alone",
        steps=(
            Step(
                arrays=partial(gaps, [[0.1], [], [0.2]], reward=[0, 50, 1]),
                want=Want(advantage=[-0.5, NAN, 0.5], metrics={"rows_without_action": 1}),
            ),
        ),
    ),
    Case(
        number="C4",
        title="NaN at a position that is no action token reaches no output",
        steps=(
            Step(
                arrays=partial(gaps, [[0.0, 0.1], [0.2, 0.0]], hidden={(0, 1): (-1.0, NAN)}),
                want=Want(weight=[[1.0, math.exp(0.1)], [math.exp(0.2), 1.0]]),
            ),
        ),
    ),
    Case(
        number="C5",
        title="everything rejected is a verdict, not an exception",
        steps=(
            Step(
                arrays=partial(gaps, [[3.0, 3.0], [3.0, 3.0]]),
                method=BAND,
                want=Want(
                    keep=[[False] * 2] * 2,
                    metrics={"ess_tokens": 0.0},
                    alarm="everything_rejected",
                ),
            ),
        ),
    ),
    Case(
        number="C6",
        title="asymmetric bounds are in ratio space",
        steps=(
            Step(
                arrays=partial(gaps, [[LN(4), LN(0.3)], [0.0, 0.0]]),
                method=BAND,
                want=Want(keep=[[True, False], [True, True]]),
            ),
        ),
    ),
    Case(
        number="C7",
        title="the denominator is a named choice",
        steps=tuple(
            Step(
                arrays=partial(gaps, [[0.0] * 60, [3.0] * 40]),
                method=Method(weight="band", low=0.5, high=5.0, denominator=kind),
                want=Want(denominator=z),
            )
            for kind, z in _DENOMINATORS
        ),
    ),
    Case(
        number="C8",
        title="equal tiny weights have ESS ratio 1",
        steps=(
            Step(
                arrays=partial(gaps, [[-18.0] * 5] * 2),
                method=RAW,
                want=Want(metrics={"ess_tokens": 1.0}),
            ),
        ),
    ),
    Case(
        number="C9",
        title="a row is one sample, however long it is",
        steps=(
            # Products 2 and .01: (2 + .01)² / (2 · (4 + .0001)) = .5050
            Step(
                arrays=partial(gaps, [[LN(2)], [LN(0.01) / 999] * 999]),
                method=PRODUCT_RATIO,
                want=Want(metrics={"ess_rows": 0.505}, tolerance=1e-3),
            ),
        ),
    ),
    Case(
        number="C10",
        title="an empty row changes no metric",
        steps=(
            Step(arrays=partial(gaps, [[0.1, -0.2], [0.3], [-0.4]]), want=Want()),
            Step(arrays=partial(gaps, [[0.1, -0.2], [0.3], [-0.4], []]), want=Want(as_step=0)),
        ),
    ),
    Case(
        number="C11",
        title="an extreme ratio is bounded, and recorded raw",
        steps=(
            *(
                Step(
                    arrays=partial(gaps, [[0.0, 0.0], [0.0, 0.0]], hidden={(0, 1): extreme}),
                    want=Want(weight=[[1.0, 1.0], [1.0, 1.0]], metrics={"raw_log_max": 0.0}),
                )
                for extreme in ((-1.0, -100.0), (-100.0, -1.0))
            ),
            Step(
                arrays=partial(padded, [[-1.0, -1.0], [-1.0]], [[-1.0, -100.0], [-1.0]]),
                want=Want(weight=[[1.0, 2.0], [1.0]], metrics={"raw_log_max": 99.0}),
            ),
            Step(
                arrays=partial(padded, [[-1.0, -100.0], [-1.0]], [[-1.0, -1.0], [-1.0]]),
                want=Want(weight=[[1.0, 0.0], [1.0]], metrics={"raw_log_max": 99.0}),
            ),
        ),
    ),
    Case(
        number="C12",
        title="a missing log-prob is excluded and counted, a missing row rejected",
        steps=(
            Step(
                arrays=partial(gaps, [[0.0, NAN], [0.2]], reward=[0, 1]),
                want=Want(
                    keep=[[True, False], [True]],
                    advantage=[-0.5, 0.5],
                    metrics={"missing": 1},
                ),
            ),
            Step(
                arrays=partial(gaps, [[0.1], [0.2], [NAN, NAN]], reward=[0, 1, 9]),
                want=Want(
                    keep=[[True], [True], [False, False]],
                    advantage=[-0.5, 0.5, NAN],
                    alarm="missing_logprobs",
                ),
            ),
        ),
    ),
    Case(
        number="C13",
        title="log-probs shorter than the tokens are refused, never padded",
        steps=(Step(arrays=_ragged, want=Want(refused=True)),),
    ),
    Case(
        number="C14",
        title="raw log-probs at a temperature are refused, truncated support is named",
        steps=(
            Step(
                arrays=partial(gaps, [[0.1], [0.2]]),
                run=Run(temperature=0.6, raw_logprobs=True),
                want=Want(refused=True),
            ),
            Step(arrays=_truncated, want=Want(metrics={"support": 0.95, "rest_abs": 0.0})),
        ),
    ),
    Case(
        number="C15",
        title="equal policies on 30 % action tokens have statistics without spread",
        steps=(
            Step(
                arrays=partial(gaps, [[0.0] * 3] * 3, hidden=_SPARSE),
                want=Want(
                    weight=[[1.0] * 3] * 3,
                    metrics={
                        "weight_min": 1.0,
                        "weight_max": 1.0,
                        "weight_mean": 1.0,
                        "weight_std": 0.0,
                        "ess_tokens": 1.0,
                    },
                ),
            ),
        ),
    ),
    Case(
        number="C16",
        title="an appended end token with log-prob 0 leaves the product alone",
        steps=(
            Step(
                arrays=partial(gaps, [[0.1, 0.2], [0.0, 0.0]], hidden={(0, 2): (-9.0, 0.0)}),
                method=PRODUCT_RATIO,
                want=Want(weight=[[math.exp(0.3)] * 2, [1.0, 1.0]]),
            ),
        ),
    ),
    Case(
        number="C17",
        title="tool tokens with log-prob 0 are in no statistic and no alarm",
        steps=(
            Step(arrays=partial(gaps, [[0.1, 0.2], [0.0, -0.1]]), want=Want()),
            Step(
                arrays=partial(
                    gaps, [[0.1, 0.2], [0.0, -0.1]], hidden={(0, 1): (-7.0, 0.0), (1, 0): (-7.0, 0)}
                ),
                want=Want(as_step=0),
            ),
        ),
    ),
    Case(
        number="C18",
        title="products reject by length alone; the geometric mean does not",
        steps=(
            # 1 − Φ(ln 3 / (.05 √T)): 1.4 % of 200 rows at 100 tokens, 24.4 % at 1,000.
            *(
                Step(
                    arrays=partial(_flat, length, 200),
                    method=Method(level="product", weight="band", high=3.0),
                    want=Want(metrics={"kept": share}, tolerance=0.005),
                )
                for length, share in ((100, 0.986), (1000, 0.756))
            ),
            Step(
                arrays=partial(_flat, 1000, 200),
                method=Method(level="geometric", weight="band", high=3.0),
                want=Want(metrics={"kept": 1.0}),
            ),
        ),
    ),
    Case(
        number="C19",
        title="truncation raises no small weight",
        steps=(
            Step(
                arrays=partial(gaps, [[LN(0.05), LN(0.2), LN(0.9)], [0.0, LN(3), LN(8)]]),
                method=Method(weight="truncate", high=5.0),
                want=Want(weight=[[0.05, 0.2, 0.9], [1.0, 3.0, 5.0]]),
            ),
        ),
    ),
    Case(
        number="C20",
        title="raw and applied extremes are both reported",
        steps=tuple(
            Step(
                arrays=partial(gaps, [[LN(50), 0.0], [0.0, 0.0]]),
                method=method,
                want=Want(
                    metrics={"raw_max": 50.0, "weight_max": applied, "over_high": 0.25},
                    tolerance=1e-4,
                ),
            )
            for method, applied in (
                (Method(weight="truncate", high=3.0), 3.0),
                (Method(weight="band", low=0.0, high=3.0), 1.0),
            )
        ),
    ),
    Case(
        number="C21",
        title="shares of mini-batches merge as sums and counts, extremes as extremes",
        steps=tuple(
            Step(
                arrays=partial(gaps, [[LN(high)] * 3 + [0.0] * 2, [0.0] * 5]),
                method=Method(weight="truncate", high=1.05),
                want=Want(),
            )
            for high in (1.1, 1.9, 1.2, 1.3)
        ),
        merged={"over_high": 0.3, "raw_max": 1.9},
    ),
    Case(
        number="C22",
        title="float32 keeps a difference of .03, bfloat16 inputs are refused",
        steps=(
            Step(
                arrays=partial(padded, [[-12.34], [-1.0]], [[-12.31], [-1.0]]),
                want=Want(metrics={"raw_log_max": 0.03}, tolerance=1e-5),
            ),
            Step(arrays=_bfloat16, want=Want(refused=True)),
        ),
    ),
    Case(
        number="C23",
        title="an asynchronous run is never uncorrected because nothing was said",
        steps=(
            Step(
                arrays=partial(gaps, [[0.5], [-0.5]]),
                run=Run(asynchronous=True, chosen=False),
                want=Want(corrected=True),
            ),
        ),
    ),
    Case(
        number="C24",
        title="a correction that is configured and never applied is noticed",
        steps=(
            Step(
                arrays=partial(padded, [[-1.0, -2.0], [-1.5]], [[-1.1, -1.9], [-1.6]]),
                method=Method(weight="one"),
                run=Run(corrects=True),
                want=Want(alarm="never_applied"),
            ),
        ),
    ),
    Case(
        number="C25",
        title="later iterations move π_θ and not the weight",
        steps=tuple(
            Step(
                arrays=partial(
                    padded,
                    [[-1.0], [-1.0]],
                    [[-1.5], [-0.5]],
                    current=[[-1.0 + moved], [-1.0 + moved]],
                ),
                want=Want(weight=[[math.exp(0.5)], [math.exp(-0.5)]]),
            )
            for moved in (0.0, 0.1)
        ),
    ),
    Case(
        number="C26",
        title="a token that is left out of a geometric mean is no tiny factor of it",
        steps=(
            # Nine ratios of e^.1; with 1e-10 as a tenth the mean would be .11.
            Step(
                arrays=partial(gaps, [[0.1] * 9, [0.0] * 9], hidden={(0, 4): (-24.0, -1.0)}),
                method=Method(level="geometric", weight="band", low=0.5, high=2.0),
                want=Want(keep=[[True] * 9] * 2),
            ),
        ),
    ),
    Case(
        number="C27",
        title="quantiles above 2^24 tokens",
        steps=(
            Step(arrays=_many, want=Want(metrics={"median": 0.5, "p99": 0.99}, tolerance=0.006)),
        ),
    ),
)
"""Every case, in order."""
