"""Do log-probs agree with the trainer's, as far as the engine's precision allows?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trueup.testing.engine.finding import Check, Finding
from trueup.testing.engine.subject import REPLIES, REPLY_TOKENS, Subject
from trueup.testing.protocol import NotExpressible

if TYPE_CHECKING:
    from trueup.testing.engine.scoring import Asked, Scored, Weights

ROOM = 2.0
"""Times its floor that an engine may be off."""
_LEAST = 1e-4
"""Nats that every engine may be off: two float32 forwards are, by a tenth of it."""
_CERTAIN_Z = 5.0
_LEAST_BIAS = 2e-3
"""|mean ratio − 1| that is the rounding of log-probs and no bias of sampling."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Replies at temperature 1, scored."""

    asked: Asked
    weights: Weights
    """What the engine is said to serve."""
    scored: Scored

    @property
    def mean_off(self) -> float:
        """Mean |d| in nats; NaN if no token has a log-prob."""
        return float(self.scored.off.mean())


async def evidence(subject: Subject) -> Evidence:
    """Ask for replies and score them; remembered.

    Raises:
        NotExpressible: No model directory was given.
    """
    scorer = subject.need_scorer()

    async def ask() -> Evidence:
        from trueup.testing.engine.scoring import Asked

        prompts = subject.prompts(REPLIES, 8, "scored")
        asked = Asked(prompts=prompts, said=await subject.ask_all(prompts, REPLY_TOKENS))
        weights = subject.publisher.latest if subject.publisher else scorer.base
        return Evidence(asked=asked, weights=weights, scored=scorer.score(weights, asked))

    return await subject.once("scored", ask)


async def limit(subject: Subject, weights: Weights, asked: Asked) -> float:
    """Mean |d| in nats that the engine's precision allows on these tokens."""
    floor = await subject.need_scorer().floor(weights, asked, subject.info.precision)
    return ROOM * floor + _LEAST


async def _at_the_floor(subject: Subject) -> Finding:
    found = await evidence(subject)
    allowed = await limit(subject, found.weights, found.asked)
    return Finding(
        ok=found.mean_off <= allowed,
        measured=f"mean |d| {found.mean_off:.2g} nats over {len(found.scored.off)} tokens, limit "
        f"{allowed:.2g} in "
        f"{subject.info.precision} (twice what the embedded engine has on them)",
    )


async def _calibrated(subject: Subject) -> Finding:
    from trueup.diagnostics.calibration import calibration

    found = calibration((await evidence(subject)).scored.gap)
    bias = found.ratio_mean - 1
    return Finding(
        ok=abs(found.z) <= _CERTAIN_Z or abs(bias) <= _LEAST_BIAS,
        measured=f"mean ratio {found.ratio_mean:.4f}, z = {found.z:+.1f} ({found.tokens} tokens)",
    )


async def _surprise(subject: Subject) -> Finding:
    """Draws from a distribution are on average as improbable as its entropy says.

    Given what came before, each token's excess has mean 0: their squares add up to the variance.
    """
    scored = (await evidence(subject)).scored
    excess = -scored.gap.logp_target.double() - scored.entropy.double()
    error = float(excess.square().sum().sqrt())
    z = float(excess.sum()) / error if error else 0.0
    mean = float(excess.mean())
    return Finding(
        ok=abs(z) <= _CERTAIN_Z,
        measured=f"{mean:+.3f} nats, z = {z:+.1f} over {len(excess)} tokens (below 0: too sharp)",
    )


async def _quantisation_acts(subject: Subject) -> Finding:
    precision = subject.info.precision
    plain = precision.partition("+")[0]
    if plain == precision:
        raise NotExpressible(f"{precision} claims no quantisation")
    found = await evidence(subject)
    scorer = subject.need_scorer()
    quantised, unquantised = [
        await scorer.floor(found.weights, found.asked, name) for name in (precision, plain)
    ]
    if quantised < 3 * unquantised:
        raise NotExpressible(
            f"floors {quantised:.2g} and {unquantised:.2g} nats are too near to tell apart"
        )
    least = (quantised * unquantised) ** 0.5
    return Finding(
        ok=found.mean_off >= least,
        measured=f"mean |d| {found.mean_off:.2g} nats over {len(found.scored.off)} tokens; "
        f"{quantised:.2g} is usual in {precision}, {unquantised:.2g} in {plain}",
    )


CHECKS = (
    Check(
        name="at_the_floor",
        expected="log-probs that differ from the trainer's by rounding only",
        usually="other weights than the model directory's, a layer or a mask that is missing, "
        "log-probs of another token, temperature or truncation",
        false_alarm="none within twice the floor",
        run=_at_the_floor,
    ),
    Check(
        name="calibrated",
        expected=f"a mean ratio of trainer to engine of 1, |z| <= {_CERTAIN_Z:g}",
        usually="a truncated support that is not reported, or log-probs of something else than "
        "what was sampled from",
        false_alarm="1e-5",
        run=_calibrated,
    ),
    Check(
        name="as_surprising_as_the_trainer",
        expected=f"tokens on average as improbable as the trainer's entropy, |z| <= {_CERTAIN_Z:g}",
        usually="another temperature or truncation than the one that was asked for",
        false_alarm="6e-7, somewhat more the larger the floor is",
        run=_surprise,
    ),
    Check(
        name="quantisation_acts",
        expected="log-probs as far from the trainer's as the claimed quantisation makes them",
        usually="a quantisation option that is accepted and does nothing for this model",
        false_alarm="none within a factor of √3 of the usual floors",
        run=_quantisation_acts,
    ),
)
