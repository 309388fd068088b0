"""Any correction inside TRL's `GRPOTrainer`.

    class Trainer(TrueUp, GRPOTrainer): ...
    trainer = Trainer(..., correction="ais")

The correction is decided once per generation batch, over all processes, before TRL shuffles and
splits it, and reaches the loss as per-token advantages w_t·A_t, which every loss of TRL takes.
Nothing of TRL is imported here: the mixin overrides four of its methods, whose signatures a test
pins for TRL 1.16.

Shapes: B rows of this process, T positions of a completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from trueup.corrections.method import Filters, parts
from trueup.corrections.table import find
from trueup.errors import DataError
from trueup.gap import PolicyGap
from trueup.integrations.decode import DecodeLogps
from trueup.integrations.figures import figures
from trueup.integrations.padded import apply
from trueup.integrations.trl_limits import refuse_ignored

Route = Literal["advantages", "ratio"]
"""How weights reach the loss: inside the advantages, or as TRL's `importance_sampling_ratio`."""

_FORWARD = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
"""Entries of a batch that TRL hands to the model with the ids."""


class TrueUp:
    """Mixin that goes before `GRPOTrainer` in the bases.

    A `rollout_func` may return besides TRL's three lists: `version`, one integer per row, the
    optimiser step whose weights sampled it; `logp_version`, per row the log-probs of the
    completion under these weights in the trainer's numerics, for attribution.
    """

    gap: PolicyGap
    """The newest generation batch, of all processes; for `trueup.diagnostics`."""

    def __init__(
        self,
        *args: Any,
        correction: str = "ais",
        correction_params: Mapping[str, float] | None = None,
        correction_filters: Filters | None = None,
        route: Route = "advantages",
        **kwargs: Any,
    ) -> None:
        """Build the trainer with a preset of the correction table.

        Args:
            args: Of the trainer.
            correction: Name of the preset.
            correction_params: Overrides of its constants.
            correction_filters: Presets whose filters come first, with overrides.
            route: How weights reach the loss.
            kwargs: Of the trainer.

        Raises:
            ConfigError: A name or constant is wrong, or TRL would ignore log-probs or weights.
        """
        parts(find(correction), correction_params or {}, correction_filters or {})  # all known?
        super().__init__(*args, **kwargs)
        self._correction = {
            "preset": correction,
            "params": correction_params,
            "filters": correction_filters,
        }
        self._route = route
        refuse_ignored(self, ratio=route == "ratio")

    def _generate_single_turn(
        self: Any,
        prompt_ids: Any,
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> Any:
        turn = (prompt_ids, images, multimodal_fields, num_generations, has_tool_images)
        if self.use_vllm:
            return super()._generate_single_turn(*turn)  # type: ignore[misc]
        model = self.accelerator.unwrap_model(self.model)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT
        with DecodeLogps(base, temperature=self.temperature) as recorded:
            completion_ids, _ = super()._generate_single_turn(*turn)  # type: ignore[misc]
        return completion_ids, recorded.of(completion_ids)

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)  # type: ignore[misc]
        _, completion_ids, _, _, logps, *_ = generated
        check_lengths(completion_ids, logps, field="logprobs")
        return generated

    def _generate_and_score_completions(self: Any, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        target = batch.get("old_per_token_logps")
        if target is None:
            target = self._score(batch)
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        now, training = self.state.global_step, self.model.training
        size = self.num_generations if training else self.num_generations_eval
        versions = rows_of(inputs, "version")
        if versions is None and self.rollout_func is None:
            versions = [now] * len(mask)  # TRL hands the newest weights to its own generation
        scores = rows_of(inputs, "logp_version")
        advantages = self._everywhere(batch["advantages"])
        applied = apply(
            advantages,
            target=self._everywhere(target),
            behaviour=self._everywhere(batch["sampling_per_token_logps"]),
            mask=self._everywhere(mask),
            group=torch.arange(len(advantages), device=mask.device) // size,
            version=None
            if versions is None
            else self._everywhere(torch.tensor(versions, device=mask.device)),
            trainer_version=now,
            turn=turns(self._everywhere(mask)),
            logp_version=None if scores is None else self._everywhere(ragged(scores, target)),
            **self._correction,
        )
        self.gap = applied.gap
        own = slice(self.accelerator.process_index * len(mask), None)
        weighted, plain, weight = (
            x[own][: mask.shape[0], : mask.shape[1]]
            for x in (applied.advantages, applied.unweighted, applied.weight)
        )
        by_ratio = self._route == "ratio"
        batch["advantages"] = plain if by_ratio else weighted
        if "importance_sampling_ratio" in batch:
            batch["importance_sampling_ratio"] = weight if by_ratio else torch.ones_like(weight)
        logged = self._metrics["train" if training else "eval"]
        for name, value in figures(applied.metrics).items():
            logged[f"trueup/{name}"].append(value)
        return batch

    @torch.no_grad()
    def _score(self: Any, batch: dict[str, Any]) -> Tensor:
        """[B, T] log π_old where TRL saves that forward; the weights are still those of μ."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        logps, _, _ = self._get_per_token_logps_and_entropies(
            self.model,
            ids,
            attention,
            batch["completion_ids"].shape[1],
            batch_size=self.args.per_device_train_batch_size,
            **{name: batch[name] for name in _FORWARD if name in batch},
        )
        return cast("Tensor", logps)

    def _everywhere(self: Any, values: Tensor) -> Tensor:
        """Rows of all processes: what a correction decides must not depend on their number."""
        padded = self.accelerator.pad_across_processes(values, dim=1)
        return cast("Tensor", self.accelerator.gather(padded))


def check_lengths(
    completions: Sequence[Sequence[int]], logps: Sequence[Sequence[float]] | None, *, field: str
) -> None:
    """Refuse log-probs that do not pair with the ids; TRL would pad them with 0, probability 1.

    Raises:
        DataError: There are none, or a row has more or fewer than ids.
    """
    if logps is None:
        raise DataError(field=field, rule="given for every completion", value=None)
    for row, (ids, values) in enumerate(zip(completions, logps, strict=True)):
        if len(ids) != len(values):
            raise DataError(
                field=f"{field}[{row}]", rule=f"of length {len(ids)}", value=len(values)
            )


def rows_of(inputs: Sequence[Mapping[str, Any]], name: str) -> list[Any] | None:
    """What a `rollout_func` returned for each row under a name; None if nothing.

    Raises:
        DataError: It is there for some rows only.
    """
    found = [row[name] for row in inputs if row.get(name) is not None]
    if found and len(found) != len(inputs):
        raise DataError(field=name, rule=f"given for all {len(inputs)} rows", value=len(found))
    return found or None


def turns(mask: Tensor) -> Tensor:
    """[B, T] turn of each position: the runs of action tokens, counted from 1."""
    starts = mask.bool().long().diff(dim=1, prepend=torch.zeros_like(mask[:, :1]).long()) > 0
    return starts.cumsum(1)


def ragged(rows: Sequence[Sequence[float]], like: Tensor) -> Tensor:
    """Rows of any length as [B, T] with NaN after their end."""
    padded = torch.full_like(like, torch.nan)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = torch.tensor(values, dtype=like.dtype)
    return padded
