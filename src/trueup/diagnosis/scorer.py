"""The trainer's forward under any weights: the yardstick of every diagnosis.

One model is held; a version's tensors are copied into it before it scores. What a cause changes in
the forward (another LM head, a layer left out, keys and values of other weights before some
position) is an argument, so that a cause is a description of weights and never a second forward.

Legend: S completions, N action tokens, L longest sequence, H hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trueup.diagnosis.rollouts import Rollouts
from trueup.errors import DataError
from trueup.gap import distinct
from trueup.models.load import load_state, state_tensors
from trueup.models.logprobs import action_logits, action_logprobs
from trueup.models.quantization.fake import block_linears, quantized_forward
from trueup.models.quantization.schemes import Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Weights = Mapping[str, Tensor]
"""The tensors of a version by name, in any floating-point dtype."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What an engine may have had in its memory when it sampled a token."""

    weights: Weights
    head: Tensor | None = None
    """Weight of another LM head than the weights'."""
    skipped: int | None = None
    """A layer that passes its input through."""


class Scorer:
    """Scores completions under a description of what was served.

    Args:
        model: A causal LM in evaluation mode, owned by the scorer from now on; its dtype is the
            arithmetic of the scores.
        scheme: Grid on which the linear layers of the blocks multiply; None for none.
        rounded: Dtype in which the engine holds all that is on no grid.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        scheme: Scheme | None = None,
        rounded: torch.dtype | None = None,
    ) -> None:
        """Take over a model."""
        self._model: Any = model
        self._scheme = scheme
        self._rounded = rounded
        on_grid = block_linears(model) if scheme is not None else {}
        self._on_grid = {f"{name}.weight" for name in on_grid}
        self._served: Weights | None = None
        accepted = inspect.signature(self._model.base_model.forward).parameters
        # Transformers renamed it in 5.24; the old name warns.
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"

    @property
    def head_name(self) -> str:
        """Name of the tensor that the LM head multiplies with; of a tied one the embedding's."""
        weight = self._model.get_output_embeddings().weight
        return next(
            n for n, t in state_tensors(self._model).items() if t.data_ptr() == weight.data_ptr()
        )

    @property
    def layers(self) -> int:
        """Blocks of the model."""
        return len(self._blocks())

    @torch.no_grad()
    def logp(self, rollouts: Rollouts, serving: Serving, *, alone: bool = False) -> Tensor:
        """[N] float64 log-probs of the sampled tokens at their own temperature.

        Args:
            rollouts: What to score.
            serving: What was in memory.
            alone: One sequence in each forward.
        """
        found = rollouts.said.new_zeros(len(rollouts.said))
        size = 1 if alone else _POSITIONS
        with self._serving(serving):
            for rows, actions, temperature in _by_temperature(rollouts):
                batch = rollouts.packed.select(rows)
                scores = action_logprobs(
                    self._model, batch, temperature=temperature, microbatch_tokens=size
                )
                found[actions] = scores.logp.double()
        return found

    @torch.no_grad()
    def logits(self, rollouts: Rollouts, serving: Serving) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunks of ([C] action tokens, [C, V] logits before the temperature)."""
        with self._serving(serving):
            vocabulary = self._model.config.vocab_size
            chunk = max(16, _LOGITS // vocabulary)
            yield from action_logits(self._model, rollouts.packed, chunk_tokens=chunk)

    @torch.no_grad()
    def behind(self, rollouts: Rollouts, old: Serving, new: Serving, cached: Tensor) -> Tensor:
        """[N] log-probs where the first positions have keys and values of other weights.

        Args:
            rollouts: What to score.
            old: What computed the keys and values of the first positions.
            new: What computed everything else.
            cached: [S] int64 how many positions of each sequence; at least one token is after them.

        Returns:
            [N] float64; NaN for tokens that are predicted from the old positions.
        """
        found = torch.full_like(rollouts.said, torch.nan)
        for cut in distinct(cached)[0].tolist():
            rows = (cached == cut).nonzero().flatten()
            for part in torch.split(rows, _ROWS):
                self._behind(rollouts, old, new, part, cut, found)
        return found

    def _behind(
        self,
        rollouts: Rollouts,
        old: Serving,
        new: Serving,
        rows: Tensor,
        cut: int,
        found: Tensor,
    ) -> None:
        batch, actions = rollouts.packed.select(rows), rollouts.packed.actions_of(rows)
        lengths = batch.lengths
        row = torch.arange(len(lengths)).repeat_interleave(lengths)
        column = torch.arange(len(batch.token_ids)) - batch.offsets[row]
        padded = batch.token_ids.new_zeros(len(lengths), int(lengths.max()))
        padded[row, column] = batch.token_ids
        from transformers import DynamicCache

        dynamic: Any = DynamicCache
        held = {self._cache_argument: dynamic(config=self._model.config), "use_cache": True}
        if cut:
            with self._serving(old):
                self._model.base_model(padded[:, :cut], **held)
        with self._serving(new):
            states = self._model.base_model(padded[:, cut:], **held).last_hidden_state
            at = column[batch.action_index] - 1 - cut
            after = at >= 0
            index = (row[batch.action_index][after], at[after])
            logits = self._model.get_output_embeddings()(states[index]).double()
        where = actions[after]
        table = (logits / rollouts.temperature[where, None]).log_softmax(-1)
        found[where] = table.gather(1, rollouts.token[where, None])[:, 0]

    def along(
        self, rollouts: Rollouts, serving: Serving, factor: Tensor, changes: Weights
    ) -> dict[str, float]:
        """Derivative of Σ factor · log-prob along a change of each tensor; of no grid.

        Args:
            rollouts: What to score.
            serving: Where to differentiate.
            factor: [N] of each token.
            changes: Direction for each tensor of the result, by name.
        """
        found = dict.fromkeys(changes, 0.0)
        own = {name: p for name, p in self._model.named_parameters() if name in changes}
        with self._serving(serving), torch.enable_grad():
            for rows, _, temperature in _by_temperature(rollouts):
                for part in torch.split(rows, _ROWS):
                    held = rollouts.packed.actions_of(part)
                    scores = action_logprobs(
                        self._model, rollouts.packed.select(part), temperature=temperature
                    )
                    total = (scores.logp.double() * factor[held]).sum()
                    gradients = torch.autograd.grad(total, list(own.values()), allow_unused=True)
                    for name, gradient in zip(own, gradients, strict=True):
                        if gradient is not None:
                            found[name] += float((gradient * changes[name]).sum())
        return found

    @contextmanager
    def _serving(self, serving: Serving) -> Iterator[None]:
        if serving.weights is not self._served:
            load_state(self._model, {n: self._held(n, t) for n, t in serving.weights.items()})
            self._served = serving.weights
        grid = (
            nullcontext() if self._scheme is None else quantized_forward(self._model, self._scheme)
        )
        with self._with_head(serving.head), self._without(serving.skipped), grid:
            yield

    def _held(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor as the engine holds it, in the arithmetic of the scores."""
        if self._rounded is not None and name not in self._on_grid:
            tensor = tensor.to(self._rounded)
        return tensor.to(self._model.dtype)

    @contextmanager
    def _with_head(self, weight: Tensor | None) -> Iterator[None]:
        """Another head for a while; a tied embedding keeps its own values."""
        if weight is None:
            yield
            return
        head = self._model.get_output_embeddings()
        own = head.weight
        head.weight = nn.Parameter(self._held("", weight), requires_grad=False)
        try:
            yield
        finally:
            head.weight = own

    @contextmanager
    def _without(self, layer: int | None) -> Iterator[None]:
        """A block that returns its input for a while."""
        if layer is None:
            yield
            return

        def passed(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
            return (inputs[0], *output[1:]) if isinstance(output, tuple) else inputs[0]

        hook = self._blocks()[layer].register_forward_hook(passed)
        try:
            yield
        finally:
            hook.remove()

    def _blocks(self) -> nn.ModuleList:
        count = self._model.config.num_hidden_layers
        for module in self._model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
        raise DataError(
            field="model", rule="with a list of its layers", value=type(self._model).__name__
        )


_LOGITS = 1 << 21
"""Logits of one chunk of whole distributions."""
_POSITIONS = 8192
"""Padded positions of one forward."""
_ROWS = 64
"""Sequences of one forward behind a cache."""

Serve = Callable[[int], Serving]
"""What was in memory when tokens of a version were sampled, by the version that they name."""


def by_version(scorer: Scorer, rollouts: Rollouts, serve: Serve) -> Tensor:
    """[N] float64 log-probs, each token under what `serve` says of the version it names."""
    found = torch.full_like(rollouts.said, torch.nan)
    for version in distinct(rollouts.version)[0].tolist():
        here = rollouts.version == version
        rows = distinct(rollouts.row[here])[0]
        actions = rollouts.packed.actions_of(rows)
        scores = scorer.logp(rollouts.select(rows.tolist()), serve(version))
        found[actions] = torch.where(here[actions], scores, found[actions])
    return found


def _by_temperature(rollouts: Rollouts) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Rows of one temperature, their action tokens, and the temperature (of a row's first span)."""
    first = torch.tensor([c.spans[0].temperature if c.spans else 1.0 for c in rollouts.completions])
    for value in distinct(first)[0].tolist():
        rows = (first == value).nonzero().flatten()
        yield rows, rollouts.packed.actions_of(rows), value
