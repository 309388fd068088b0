"""A few trained episodes, token by token: what was sampled, by which version, and how far off.

They are picked for what they show (best and worst reward, most versions, widest gap), from the last
step whose table can be read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from trueup.errors import DataError
from trueup.records.directory import RunDirectory
from trueup.records.tokens import read_step, steps_written
from trueup.reports.markup import Markup, element, join
from trueup.reports.svg import TONES

MAX_TOKENS = 400
"""Tokens shown of one episode."""
GAP_LEVELS = (0.01, 0.05, 0.2, 0.5)
"""|d| in nats from which a token is marked more strongly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token as it is shown."""

    text: str
    turn: int
    version: int | None = None
    """None: not an action, the world's."""
    d: float | None = None
    """log π_old − log μ."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One segment of an episode."""

    why: str
    task: str
    episode: str
    step: int
    status: str
    reward: float | None
    tokens: tuple[Token, ...]
    left_out: int
    """Tokens beyond `MAX_TOKENS`."""


def samples(run_dir: Path) -> list[Sample]:
    """Up to four different episodes; none if there is no readable table."""
    directory = RunDirectory(run_dir)
    words = vocabulary(run_dir)
    for step in reversed(steps_written(directory)):
        try:
            table = read_step(directory, step)
        except DataError:
            continue
        rows = table.filter(table["logp_target"].is_valid()).to_pylist()
        if rows:
            return [_sample(why, row, words) for why, row in _picks(rows)]
    return []


def vocabulary(run_dir: Path) -> dict[int, str]:
    """Token id -> text from the newest checkpoint's `tokenizer.json`; empty without one."""
    for path in sorted(RunDirectory(run_dir).checkpoints.rglob("tokenizer.json"), reverse=True):
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            vocab = stored["model"]["vocab"]
            pairs = (
                vocab.items()
                if isinstance(vocab, dict)
                else ((v[0], i) for i, v in enumerate(vocab))
            )
            words = {int(i): str(word) for word, i in pairs}
            return words | {int(t["id"]): str(t["content"]) for t in stored.get("added_tokens", ())}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return {}


def render(sample: Sample) -> Markup:
    """The episode as rows of chips, one row per change between world and agent."""
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:g}"
    head = element(
        "header",
        element("strong", sample.why),
        element("span", sample.task, class_="task"),
        element("span", f"step {sample.step} · {sample.status} · {reward}", class_="muted"),
    )
    rows: list[str] = [head]
    for (_, agent), run in groupby(sample.tokens, lambda t: (t.turn, t.version is not None)):
        rows.append(
            element(
                "div",
                element("span", "agent" if agent else "world", class_="who"),
                element("span", join(_chip(token) for token in run), class_="chips"),
                class_="turn agent" if agent else "turn",
            )
        )
    if sample.left_out:
        rows.append(element("p", f"… {sample.left_out} more tokens", class_="muted"))
    return element("article", *rows, class_="episode")


def _chip(token: Token) -> Markup:
    if token.version is None:
        return element("span", token.text, class_="token")
    level = sum(abs(token.d) >= limit for limit in GAP_LEVELS) if token.d is not None else 0
    name = f"token action tone-{token.version % TONES} gap-{level}"
    return element("span", token.text, class_=name, title=token.detail)


def _picks(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    graded = [row for row in rows if row["reward"] is not None] or rows
    wanted = [
        ("Widest gap", max(rows, key=lambda r: max(map(abs, _gaps(r)), default=0.0))),
        ("Most versions", max(rows, key=lambda r: len({s["version"] for s in r["spans"]}))),
        ("Highest reward", max(graded, key=lambda r: r["reward"] or 0.0)),
        ("Lowest reward", min(graded, key=lambda r: r["reward"] or 0.0)),
    ]
    picked: dict[tuple[str, int], tuple[str, Mapping[str, Any]]] = {}
    for why, row in wanted:
        key = (row["episode"], row["segment"])
        before = f"{picked[key][0]}, {why.lower()}" if key in picked else why
        picked[key] = (before, row)
    return list(picked.values())


def _gaps(row: Mapping[str, Any]) -> list[float]:
    pairs = zip(row["logp_target"], row["logp_behaviour"], strict=True)
    return [d for t, b in pairs if math.isfinite(d := t - b)]


def _sample(why: str, row: Mapping[str, Any], words: Mapping[int, str]) -> Sample:
    at = {i: span for span in row["spans"] for i in range(span["start"], span["stop"])}
    tokens: list[Token] = []
    seen = 0
    for index, turn, action in zip(row["token_ids"], row["turn"], row["action"], strict=True):
        text = words.get(index, str(index))
        if not action:
            tokens.append(Token(text=text, turn=turn))
            continue
        span = at[seen]
        behaviour, target = row["logp_behaviour"][seen], row["logp_target"][seen]
        detail = [
            f"version {span['version']} on {span['engine']} ({span['precision']})",
            f"log μ {behaviour:.3f}",
            f"log π {target:.3f}",
            f"gap {target - behaviour:+.3f}",
        ]
        if row["weight"] is not None:
            detail.append(f"weight {row['weight'][seen]:.2f}")
        if row["keep"] is not None and not row["keep"][seen]:
            detail.append("not in the loss")
        tokens.append(
            Token(
                text=text,
                turn=turn,
                version=span["version"],
                d=target - behaviour,
                detail=" · ".join(detail),
            )
        )
        seen += 1
    return Sample(
        why=why,
        task=row["task"],
        episode=row["episode"],
        step=row["step"],
        status=row["status"],
        reward=row["reward"],
        tokens=tuple(tokens[:MAX_TOKENS]),
        left_out=max(0, len(tokens) - MAX_TOKENS),
    )
