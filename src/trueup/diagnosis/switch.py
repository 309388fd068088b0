"""Where, in turns that an update cut in two, the weights changed, if no label says it."""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.diagnosis.case import Case
from trueup.diagnosis.exam import Wave


def switched(case: Case) -> Tensor:
    """[N] log-probs of turns in flight: version u before some token, v from it on.

    They were asked for together, so the token has about the same index in all of them. Each half
    of them gets the index that fits the other half best: what is fitted is never tested on itself.
    """
    rollouts = case.rollouts
    found = case.under_new.clone()
    here = case.rows(Wave.ACROSS) & rollouts.known
    y = rollouts.said
    gain = (y - case.under_new).square() - (y - case.under_old).square()
    for half in (0, 1):
        mine = rollouts.row % 2 == half
        index = _best(gain, rollouts.at, here & ~mine)
        early = case.rows(Wave.ACROSS) & mine & (rollouts.at < index)
        found = torch.where(early, case.under_old, found)
    return found


def _best(gain: Tensor, at: Tensor, among: Tensor) -> int:
    """Index before which version u explains the tokens better by the most; 0 if nowhere."""
    if not among.any():
        return 0
    sums = torch.zeros(int(at[among].max()) + 1, dtype=gain.dtype)
    total = sums.index_add(0, at[among], gain[among]).cumsum(0)
    return int(total.argmax()) + 1 if float(total.max()) > 0 else 0
