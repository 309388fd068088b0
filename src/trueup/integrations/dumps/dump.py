"""The one record that every reader makes, and how recorded samples are packed into it.

Nothing is made up: what is missing is named, with what cannot be told without it.

Legend: n action tokens of a sample, N of a step batch, E episodes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trueup.corrections.whatif import Replay
from trueup.errors import DataError
from trueup.gap import PolicyGap

POSITIVE = 1e-3
"""A log-prob above 0 by more than this is none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """The action tokens of one segment; consecutive samples of one episode are its segments."""

    step: int
    """Step batch that consumed it."""
    episode: str
    """Name of the episode, for messages."""
    logp_target: Tensor
    """[n] float32, as all log-probs."""
    logp_behaviour: Tensor
    """[n], NaN where missing."""
    logp_version: Tensor | None = None
    """[n], NaN where not scored."""
    reward: float | None = None
    advantage: float | None = None
    """Recorded advantage; it stands in where no reward is recorded."""
    group: Hashable | None = None
    version: Tensor | None = None
    """[n] int64."""
    lag: Tensor | None = None
    """[n] int64."""
    engine: Sequence[str] | None = None
    """[n] names."""
    turn: Tensor | None = None
    """[n] int64."""


@dataclass(frozen=True, kw_only=True)
class Dump:
    """Recorded step batches."""

    source: str
    """Format that was read."""
    steps: tuple[int, ...]
    batches: tuple[PolicyGap, ...]
    """One per step."""
    engines: tuple[str, ...]
    """What `PolicyGap.engine` counts."""
    replay: Replay
    """Rules under which the batches were, or are to be, corrected."""
    missing: tuple[str, ...]
    """What is not recorded, and what cannot be told without it."""
    notes: tuple[str, ...] = field(default=())
    """What a reader of the figures should know."""


def pack(
    samples: Iterable[Sample],
    *,
    source: str,
    replay: Replay | None = None,
    missing: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Dump:
    """Pack samples into one gap per step.

    Args:
        samples: In any order of steps; the samples of an episode follow each other.
        source: Name of the format.
        replay: Rules of the run; by default they follow from what is recorded.
        missing: Said by the reader.
        notes: Said by the reader.

    Raises:
        DataError: There is no sample, a target log-prob is not finite, a log-prob is above 0, or
            only some episodes have a reward, group, version or engine. The episode is named.
    """
    found = list(samples)
    if not found:
        raise DataError(field=source, rule="with at least one consumed episode", value="none")
    for sample in found:
        _check(sample)
    known = {
        name: _everywhere(found, name) for name in ("reward", "group", "version", "lag", "engine")
    }
    by_advantage = not known["reward"] and _everywhere(found, "advantage")
    default = Replay(advantage="group" if by_advantage else "group_std")
    by_step: dict[int, list[Sample]] = {}
    for sample in found:
        by_step.setdefault(sample.step, []).append(sample)
    engines = tuple(sorted({name for s in found for name in s.engine or ()}))
    steps = tuple(sorted(by_step))
    batches = tuple(_gap(by_step[step], engines, by_advantage=by_advantage) for step in steps)
    return Dump(
        source=source,
        steps=steps,
        batches=batches,
        engines=engines,
        replay=replay or default,
        missing=(*missing, *_missing(found, known, by_advantage=by_advantage)),
        notes=(*notes, *_notes(batches)),
    )


def _gap(samples: Sequence[Sample], engines: Sequence[str], *, by_advantage: bool) -> PolicyGap:
    firsts = [
        i for i, s in enumerate(samples) if i == 0 or s.episode != samples[i - 1].episode
    ]  # first sample of each episode
    heads = [samples[i] for i in firsts]
    numbers: dict[Hashable, int] = {}
    lengths = torch.tensor([len(s.logp_target) for s in samples], dtype=torch.int64)
    total = int(lengths.sum())
    starts = torch.zeros(len(samples), dtype=torch.int64)
    starts[firsts] = 1
    scored = any(s.logp_version is not None for s in samples)
    rewards = [(s.advantage if by_advantage else s.reward) or 0.0 for s in heads]
    index = {name: i for i, name in enumerate(engines)}
    return PolicyGap(
        logp_target=torch.cat([s.logp_target for s in samples]),
        logp_behaviour=torch.cat([s.logp_behaviour for s in samples]),
        segment_offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        segment_episode=starts.cumsum(0) - 1,
        group=torch.tensor([numbers.setdefault(s.group, len(numbers)) for s in heads]),
        reward=torch.tensor(rewards, dtype=torch.float32),
        version=_ints([s.version for s in samples], total, unknown=-1),
        lag=_ints([s.lag for s in samples], total, unknown=0),
        turn=None
        if any(s.turn is None for s in samples)
        else torch.cat([s.turn for s in samples if s.turn is not None]),
        engine=torch.tensor(
            [index[name] for s in samples for name in s.engine or ()], dtype=torch.int64
        )
        if engines
        else torch.zeros(total, dtype=torch.int64),
        logp_version=torch.cat(
            [
                torch.full_like(s.logp_target, torch.nan)
                if s.logp_version is None
                else s.logp_version
                for s in samples
            ]
        )
        if scored
        else None,
    )


def _ints(parts: Sequence[Tensor | None], total: int, *, unknown: int) -> Tensor:
    known = [part for part in parts if part is not None]
    return torch.cat(known) if known else torch.full((total,), unknown)


def _check(sample: Sample) -> None:
    where = f"episode {sample.episode}"
    target = torch.isfinite(sample.logp_target)
    if not bool(target.all()):
        raise DataError(
            field=f"target log-probs of {where}",
            rule="finite",
            value=f"{int((~target).sum())} of {len(target)} that are not",
        )
    for name in ("logp_target", "logp_behaviour"):
        values: Tensor = getattr(sample, name)
        above = values[values > POSITIVE]
        if len(above):
            raise DataError(field=f"{name} of {where}", rule="<= 0", value=float(above.max()))


def _everywhere(samples: Sequence[Sample], name: str) -> bool:
    """Whether all samples have it.

    Raises:
        DataError: Some have it; names the first that has not.
    """
    without = [s for s in samples if getattr(s, name) is None]
    if 0 < len(without) < len(samples):
        raise DataError(
            field=f"{name} of episode {without[0].episode}",
            rule="given, as it is for other episodes",
            value=None,
        )
    return not without


def _missing(samples: Sequence[Sample], known: dict[str, bool], *, by_advantage: bool) -> list[str]:
    found = []
    if by_advantage:
        found.append("no rewards: the recorded advantages stand for them")
    elif not known["reward"]:
        found.append(
            "no rewards and no advantages: neither bias and variance, nor what signed filters and "
            "AIS's inflation term do, nor kept shares by reward can be told"
        )
    if not known["group"]:
        found.append("no group ids: the baseline is the mean of the step batch")
    unscored = all(s.logp_version is None for s in samples)
    if not known["lag"]:
        which = "versions of the trainer" if known["version"] else "weight versions"
        found.append(f"no {which}: staleness and engine cannot be told apart")
    elif unscored:
        found.append(
            "no log-probs under the sampling versions: staleness and engine cannot be told apart"
        )
    return found


def _notes(batches: Sequence[PolicyGap]) -> list[str]:
    found = []
    behaviour = torch.cat([gap.logp_behaviour for gap in batches])
    target = torch.cat([gap.logp_target for gap in batches])
    unknown = int((~torch.isfinite(behaviour)).sum())
    if unknown:
        found.append(
            f"{unknown} of {len(behaviour)} action tokens ({unknown / len(behaviour):.2%}) have no "
            "finite behaviour log-prob: left out of loss and statistics"
        )
    for name, values in (("behaviour", behaviour), ("target", target)):
        kind = _rounded_to(values)
        if kind:
            found.append(
                f"the {name} log-probs are {kind} numbers: rounding alone moves each by up to "
                f"{'2^-9' if kind == 'bfloat16' else '2^-12'} of its size"
            )
    return found


def _rounded_to(values: Tensor) -> str:
    """Narrower type that holds all values exactly; empty if there is none, or too few values."""
    told = values[torch.isfinite(values) & (values != 0)]
    bits = told.view(torch.int32)
    if len(told) < 32:  # by chance with probability 2^-13 each
        return ""
    if not bool((bits & 0xFFFF).any()):
        return "bfloat16"
    return "" if bool((bits & 0x1FFF).any()) else "float16"
