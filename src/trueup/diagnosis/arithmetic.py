"""What an engine says it computes in, and the trainer's forward in the same and in wider numbers.

The floor of an arithmetic is how far two sound forwards of the same tokens in it may be apart. It
is measured on the trainer's own: one sequence at a time in the claimed dtype, against all of them
together in a wider one, both on the claimed grid. On a grid two forwards differ where a number lies
at the edge of two cells, which is rare and large: a few completions may show none of it, so the
floor there is at least a part of what the grid itself changes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trueup.diagnosis.case import Case
from trueup.diagnosis.rollouts import Rollouts, spread
from trueup.diagnosis.scorer import Scorer, Serving
from trueup.models.quantization.schemes import SCHEMES, Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FLIPS = 0.1
"""Part of what a grid changes that numbers at the edges of its cells may change back."""
_ROWS = 16
"""Completions on which a floor is measured."""


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """A claimed precision, as spans name it, taken apart."""

    claim: str
    dtype: torch.dtype
    scheme: Scheme | None
    """None without quantisation, and for a scheme that is not known here."""
    known: bool
    """Whether dtype and scheme are known here."""

    @classmethod
    def of(cls, precision: str) -> Arithmetic:
        """Read `bfloat16`, `float32+int8`, ...; an unknown dtype counts as bfloat16."""
        dtype, _, grid = precision.partition("+")
        return cls(
            claim=precision,
            dtype=_DTYPES.get(dtype, torch.bfloat16),
            scheme=SCHEMES.get(grid),
            known=dtype in _DTYPES and (not grid or grid in SCHEMES),
        )

    def scorer(self, model: PreTrainedModel, *, grid: bool = True) -> Scorer:
        """The forward in float32 with what the engine holds in its memory.

        Args:
            model: The architecture, copied.
            grid: On the claimed grid.
        """
        scheme = self.scheme if grid else None
        return Scorer(_copy(model, torch.float32), scheme=scheme, rounded=self._rounded)

    def narrow(self, model: PreTrainedModel) -> Scorer:
        """The forward in the claimed dtype; float32 is the wider one of float64."""
        return Scorer(_copy(model, self.dtype), scheme=self.scheme, rounded=self._rounded)

    @property
    def _rounded(self) -> torch.dtype | None:
        return None if self.dtype is torch.float32 else self.dtype


def floor(model: PreTrainedModel, case: Case) -> float | None:
    """Mean |d| in nats that the claimed arithmetic explains; None if it is not known here.

    Args:
        model: The architecture, copied.
        case: Its answers are scored under version v, whatever their labels.
    """
    arithmetic = Arithmetic.of(case.answers.precision)
    if not arithmetic.known:
        return None
    few = spread(torch.arange(len(case.rollouts.completions)), _ROWS)
    part, serving = case.rollouts.select(few.tolist()), Serving(weights=case.new.weights)
    narrow = arithmetic.narrow(model).logp(part, serving, alone=True)
    measured = (narrow - _wide(model, arithmetic, case, part, serving)).abs().mean()
    grid = (case.scorer.logp(part, serving) - case.plain.logp(part, serving)).abs().mean()
    return max(float(measured), _FLIPS * float(grid))


def _wide(
    model: PreTrainedModel, arithmetic: Arithmetic, case: Case, part: Rollouts, serving: Serving
) -> torch.Tensor:
    if arithmetic.dtype is not torch.float32:
        return case.scorer.logp(part, serving)
    wide = Scorer(_copy(model, torch.float64), scheme=arithmetic.scheme)
    return wide.logp(part, serving)


def _copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    other: Any = copy.deepcopy(model)
    copied: PreTrainedModel = other.to(dtype)
    return copied
