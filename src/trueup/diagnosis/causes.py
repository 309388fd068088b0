"""The library of causes that predict log-probs: each is one function of a case.

A cause says what log-prob every token would have had. It is compared with the others and with the
absence of any by `contest`. To add one: write a function that yields its predictions (one for each
of its kinds: which layer, which tensor), and add it to `CAUSES`.

The names are those of the faults that `engines.lying` plants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.diagnosis.case import Case
from trueup.diagnosis.contest import Prediction, contest
from trueup.diagnosis.distributions import TEMPERATURES
from trueup.diagnosis.exam import Wave
from trueup.diagnosis.scorer import Serving
from trueup.diagnosis.screening import Served, old_tensors, tried, without_layers
from trueup.diagnosis.switch import switched

Yields = Iterator[tuple[str, Tensor]]
"""(which of its kind, [N] predicted log-probs)."""

_OUTSIDE = 0.002
"""Share of the tokens that arithmetic may push over the edge of a truncated support."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Something that an engine does and does not say."""

    meaning: str
    """What the engine does."""
    remedy: str
    """What to do about it."""
    predict: Callable[[Case], Yields] | None = None
    """The log-probs that it implies. Neither this nor `served`: it is told by a sign, see `signs`.
    """
    served: Callable[[Case], tuple[Tensor, Served]] | None = None
    """Tokens [N] and, for each of very many kinds, what had been in memory: these are screened."""


def predictions(case: Case, usable: Tensor) -> list[Prediction]:
    """What each cause implies for the tokens of a case; first, that there is none.

    Args:
        case: Answers and weights.
        usable: [N] bool, tokens that are compared.
    """
    found = [Prediction(cause="", logp=case.told.logp)]
    for name, cause in CAUSES.items():
        if cause.predict is not None:
            found += [
                Prediction(cause=name, detail=detail, logp=logp)
                for detail, logp in cause.predict(case)
            ]
    so_far = contest(case.rollouts.said, found, clusters=case.rollouts.clusters, among=usable)
    best = found[so_far.index].logp
    for name, cause in CAUSES.items():
        if cause.served is not None:
            where, served = cause.served(case)
            found += [
                Prediction(cause=name, detail=detail, logp=case.scored(where, serve))
                for detail, serve in tried(case, served, where & usable, best).items()
            ]
    return found


def _missed_update(case: Case) -> Yields:
    if case.old is not None:
        yield "", torch.where(case.labelled_new, case.under_old, case.told.logp)


def _label_off_by_one(case: Case) -> Yields:
    """Tokens that were asked for after the load of v, and are labelled u."""
    if case.old is None:
        return
    late = (case.rows(Wave.AFTER) | case.rows(Wave.AGAIN)) & ~case.labelled_new
    if late.any():
        logp = torch.where(late, case.under_new, case.told.logp)
        across = case.rows(Wave.ACROSS) & ~case.labelled_new
        yield "", torch.where(across, switched(case), logp)


def _label_by_client(case: Case) -> Yields:
    """Tokens of turns in flight that are labelled v from the first one on."""
    if case.old is None:
        return
    whole = case.rows(Wave.ACROSS) & case.labelled_new & _one_label(case)
    if whole.any():
        yield "", torch.where(whole, switched(case), case.told.logp)


def _one_label(case: Case) -> Tensor:
    """[N] bool: all tokens of the completion name one version."""
    single = torch.tensor(
        [len({s.version for s in c.spans}) < 2 for c in case.rollouts.completions]
    )
    return single[case.rollouts.row]


def _stale_head(case: Case) -> Yields:
    if case.old is None:
        return
    name = case.scorer.head_name
    head = case.old.weights[name]
    if not torch.equal(head, case.new.weights[name]):
        yield "", case.under(Serving(weights=case.new.weights, head=head))


def _old_tensor(case: Case) -> tuple[Tensor, Served]:
    return case.labelled_new, {} if case.old is None else old_tensors(case)


def _layer_skipped(case: Case) -> tuple[Tensor, Served]:
    return torch.ones_like(case.usable), without_layers(case)


def _raw_logprobs(case: Case) -> Yields:
    if bool((case.rollouts.temperature != 1).any()):
        yield "", case.told.raw


def _other_temperature(case: Case) -> Yields:
    """Log-probs of another temperature than the spans name: the factor that fits them best."""
    use = case.usable
    error = (case.rollouts.said[use] - case.told.tempered[:, use]).square().sum(-1)  # [G]
    best = int(error.argmin())
    if TEMPERATURES[best] != 1.0:
        yield f"{TEMPERATURES[best]:g} times the temperature", case.told.tempered[best]


def _truncated(case: Case) -> Yields:
    use = case.usable
    for name, mass in case.told.kept.items():
        if float(case.told.outside[name][use].double().mean()) <= _OUTSIDE:
            yield name, case.told.logp - mass


def _kept_kv(case: Case) -> Yields:
    """Turns in flight, and further turns of their sessions, behind keys and values of version u."""
    if case.old is None:
        return
    cut = torch.zeros(len(case.rollouts.completions), dtype=torch.int64)
    for row, completion in enumerate(case.rollouts.completions):
        firsts = [s.start for s in completion.spans if s.version == case.new.version and s.start]
        if case.answers.waves[row] is Wave.ACROSS and firsts:
            # The last token sampled before the swap is computed after it.
            cut[row] = len(case.rollouts.requests[row].prompt_ids) + firsts[0] - 1
    if cut.any():
        yield "in flight", case.behind(cut)
        again = case.held(Wave.AGAIN)
        yield "in flight and between turns", case.behind(torch.where(again > 0, again, cut))


def _surviving_prefix_cache(case: Case) -> Yields:
    if case.old is None:
        return
    said = torch.tensor([c.tokens_cached for c in case.rollouts.completions])
    after = case.answers.wave[Wave.AFTER]
    told = torch.where(after, said, 0)
    if told.any():
        yield "as many tokens as it says it reused", case.behind(told)
    shared, again = case.held(Wave.AFTER), case.held(Wave.AGAIN)
    if shared.any():
        yield "prompts seen before", case.behind(shared)
    if again.any():
        yield "earlier turns", case.behind(again)


def _shifted(case: Case) -> Yields:
    logp, rollouts = case.told.logp, case.rollouts
    first = rollouts.at == 0
    starts = first.nonzero().flatten()
    ends = torch.cat([starts[1:], starts.new_tensor([len(logp)])]) - 1
    before = logp.roll(1)
    before[starts] = logp[ends]
    after = logp.roll(-1)
    after[ends] = logp[starts]
    yield "of the token before", before
    yield "of the token after", after
    yield "of the most probable token", case.told.best


def _noop_quantisation(case: Case) -> Yields:
    if case.plain is not case.scorer:
        yield "", case.by_claim


CAUSES: Mapping[str, Cause] = {
    "dropped_logprobs": Cause(
        meaning="log-probs of some tokens are missing, or 0 where nothing is certain",
        remedy="leave these tokens out; never read a missing log-prob as 0",
    ),
    "appended_eos": Cause(
        meaning="completions that were cut off end with a stop token that nobody sampled",
        remedy="ask for sampled tokens only, or drop the last token of a completion that was cut",
    ),
    "shifted_logprobs": Cause(
        meaning="log-probs are those of other tokens than the sampled ones",
        remedy="align log-probs and tokens where they are read from the engine",
        predict=_shifted,
    ),
    "missed_update": Cause(
        meaning="an update is acknowledged and not served: tokens are those of the version before",
        remedy="verify what is served by log-probs after every load, not by a digest of what was "
        "sent",
        predict=_missed_update,
    ),
    "label_off_by_one": Cause(
        meaning="tokens of the new version are labelled with the one before",
        remedy="set the label where the weights are swapped",
        predict=_label_off_by_one,
    ),
    "label_by_client": Cause(
        meaning="a completion that an update cut in two is labelled as if one version had sampled "
        "all of it",
        remedy="label spans in the engine, at the token where the weights change",
        predict=_label_by_client,
    ),
    "stale_head": Cause(
        meaning="the LM head is still that of the version before",
        remedy="repack the head's weights after every update",
        predict=_stale_head,
    ),
    "old_tensor": Cause(
        meaning="one tensor is still that of the version before",
        remedy="compare the names that are sent with those that the engine loads",
        served=_old_tensor,
    ),
    "layer_skipped": Cause(
        meaning="one layer passes its input through",
        remedy="check how the engine maps layers to its weights and devices",
        served=_layer_skipped,
    ),
    "wrong_temperature": Cause(
        meaning="tokens are sampled at another temperature than the spans name",
        remedy="find what overrides the sampling parameters (a generation config is usual)",
        predict=_other_temperature,
    ),
    "raw_logprobs": Cause(
        meaning="log-probs are those before the temperature",
        remedy="ask for processed log-probs, or sample at temperature 1",
        predict=_raw_logprobs,
    ),
    "top_p_unreported": Cause(
        meaning="the support is truncated and the spans do not say so",
        remedy="set top-p 1 and top-k 0 in every request, or have the kept mass returned",
        predict=_truncated,
    ),
    "kept_kv_unreported": Cause(
        meaning="keys and values of the version before stay in use after an update, unsaid",
        remedy="have the engine recompute them, or record that they were kept",
        predict=_kept_kv,
    ),
    "surviving_prefix_cache": Cause(
        meaning="prompts seen before an update are read from a cache that outlived it",
        remedy="reset the prefix cache with every update",
        predict=_surviving_prefix_cache,
    ),
    "noop_quantisation": Cause(
        meaning="a quantisation is claimed and not done",
        remedy="choose a scheme that the engine supports for this model, and measure the gap",
        predict=_noop_quantisation,
    ),
}
"""Name -> cause, in the order of the evidence table."""
