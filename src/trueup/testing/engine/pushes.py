"""Is a new version served once it is pushed: all of it, only it, and under its name?"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.testing.engine.finding import Check, Finding
from trueup.testing.engine.scored import limit
from trueup.testing.engine.scoring import Asked
from trueup.testing.engine.subject import REPLIES, REPLY_TOKENS, Subject
from trueup.testing.protocol import NotExpressible
from trueup.types import KVState, LoadReceipt, WeightManifest

_SEEN, _LENGTH = 6, 160
"""Prompts that are read before and after, and their tokens: they fill a block of any cache."""
_RUNNING, _RUNNING_TOKENS = 4, 72
_TRIES = (0.3, 0.1, 0.0)
"""Share of a reply's expected time after which a version is pushed into it."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """A version that was pushed into a running engine."""

    manifest: WeightManifest
    receipt: LoadReceipt
    before: int
    """The version served until then."""
    running: Asked
    """Replies that were in progress all the while."""
    seen: Asked
    """Prompts that the version before had read."""
    fresh: Asked
    served: int
    """What the engine says it serves afterwards."""


async def push(subject: Subject) -> Push:
    """Push a version; remembered.

    Raises:
        NotExpressible: The engine takes no weights, or no model directory was given.
    """
    subject.need_publisher()
    return await subject.once("push", lambda: _push(subject))


async def _push(subject: Subject) -> Push:
    publisher = subject.need_publisher()
    seen = subject.prompts(_SEEN, _LENGTH, "seen")
    start = time.monotonic()
    await subject.ask_all(subject.prompts(_RUNNING, 8, "pace"), _RUNNING_TOKENS)
    pace = time.monotonic() - start
    for share in _TRIES:
        await subject.ask_all(seen, 1)
        before = (await subject.engine.info()).version
        manifest = publisher.changed()
        prompts = subject.prompts(_RUNNING, 8, f"running {share}")
        tasks = [asyncio.create_task(subject.ask(prompt, _RUNNING_TOKENS)) for prompt in prompts]
        await asyncio.sleep(max(share * pace, 0.001))
        receipt = await subject.engine.load(manifest)
        through = [not task.done() for task in tasks]
        said = await asyncio.gather(*tasks)
        if any(through):
            break
    fresh = subject.prompts(REPLIES, 8, "fresh")
    return Push(
        manifest=manifest,
        receipt=receipt,
        before=before,
        running=Asked(
            prompts=[p for p, t in zip(prompts, through, strict=True) if t],
            said=[r for r, t in zip(said, through, strict=True) if t],
        ),
        seen=Asked(prompts=seen, said=await subject.ask_all(seen, REPLY_TOKENS)),
        fresh=Asked(prompts=fresh, said=await subject.ask_all(fresh, REPLY_TOKENS)),
        served=(await subject.engine.info()).version,
    )


async def _attested(subject: Subject) -> Finding:
    found = await push(subject)
    version = found.manifest.version
    labels = {span.version for reply in found.fresh.said for span in reply.spans}
    digest = found.receipt.digest == found.manifest.digest
    return Finding(
        ok=digest and found.receipt.version == found.served == version and labels == {version},
        measured=f"a receipt for version {found.receipt.version} whose digest is "
        f"{'right' if digest else 'wrong'}, version {found.served} said to be served, and replies "
        f"labelled {sorted(labels)} after version {version} was pushed",
    )


async def _arrived(subject: Subject) -> Finding:
    found = await push(subject)
    now = _off(subject, found.fresh, found.manifest.version)
    allowed = await _limit(subject, found.fresh, found.manifest.version)
    then = _off(subject, found.fresh, found.before)
    closer = "; the weights before fit better" if then.mean() < now.mean() else ""
    return Finding(
        ok=float(now.mean()) <= allowed,
        measured=f"mean |d| {now.mean():.2g} nats from the new weights over {len(now)} tokens, "
        f"limit {allowed:.2g}; {then.mean():.2g} from those before{closer}",
    )


async def _prefix_cache(subject: Subject) -> Finding:
    found = await push(subject)
    off = _off(subject, found.seen, found.manifest.version)
    allowed = await _limit(subject, found.seen, found.manifest.version)
    fresh = _off(subject, found.fresh, found.manifest.version)
    return Finding(
        ok=float(off.mean()) <= allowed,
        measured=f"mean |d| {off.mean():.2g} nats from the new weights behind prompts seen before "
        f"the push, limit {allowed:.2g}; {fresh.mean():.2g} behind new prompts",
    )


async def _running(subject: Subject) -> Finding:
    """Tokens of a reply that a push cut in two fit the version that their span names."""
    found = await push(subject)
    asked, new, old = found.running, found.manifest.version, found.before
    if not asked.said:
        raise NotExpressible("no reply was in progress when the version changed")
    spans = [span for reply in asked.said for span in reply.spans]
    strange = {span.version for span in spans} - {old, new}
    if strange:
        return Finding(ok=False, measured=f"spans of versions {sorted(strange)}")
    label = torch.tensor([s.version for s in spans for _ in range(s.start, s.stop)])
    kept = torch.tensor([s.kv is KVState.KEPT for s in spans for _ in range(s.start, s.stop)])
    both = {version: _off(subject, asked, version) for version in (old, new)}
    allowed = await _limit(subject, asked, new)
    off = torch.where(label == new, both[new], both[old])[~kept]
    parts = ", ".join(
        f"{value:.2g} in {int(where.sum())} tokens labelled {version}"
        for version in (old, new)
        if bool((where := (label == version) & ~kept).any())
        for value in [float(both[version][where].mean())]
    )
    return Finding(
        ok=not len(off) or float(off.mean()) <= allowed,
        measured=f"mean |d| {parts or '-'} nats, limit {allowed:.2g}; {int(kept.sum())} tokens "
        "behind a prefix that is reported as kept are left out",
    )


def _off(subject: Subject, asked: Asked, version: int) -> Tensor:
    """[N] |d| of the replies from the weights of a version; infinite without a log-prob."""
    weights = subject.need_publisher().tensors[version]
    gap = subject.need_scorer().score(weights, asked).gap
    return torch.where(gap.valid, gap.log_ratio.abs(), torch.inf)


async def _limit(subject: Subject, asked: Asked, version: int) -> float:
    return await limit(subject, subject.need_publisher().tensors[version], asked)


CHECKS = (
    Check(
        name="push_is_attested",
        expected="the digest, the version and the label of what was pushed",
        usually="a label that is off by one, or a digest of what was sent and not of what is held",
        false_alarm="none",
        run=_attested,
    ),
    Check(
        name="push_arrives_whole",
        expected="new prompts to be answered by the new weights, to rounding",
        usually="an update that did not arrive, or a part of the model that keeps a copy of its "
        "weights (a repacked, tied LM head)",
        false_alarm="none within twice the floor",
        run=_arrived,
    ),
    Check(
        name="push_empties_the_prefix_cache",
        expected="prompts seen before to be answered by the new weights, to rounding",
        usually="a prefix cache that is not reset after an update",
        false_alarm="none within twice the floor",
        run=_prefix_cache,
    ),
    Check(
        name="push_splits_running_replies",
        expected="each token of a reply in progress to fit the version that its span names",
        usually="one label for the whole reply, or keys and values that survive without being "
        "reported as kept",
        false_alarm="none within twice the floor",
        run=_running,
    ),
)
