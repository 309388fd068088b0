"""What a correction needs of a generation batch of TRL: its tensors, of all processes.

Shapes: B rows of this process, T positions of a completion; results of `decide` hold the rows of
all processes, padded to the longest completion of any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from trueup.errors import DataError
from trueup.integrations.padded import Applied, apply

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


def decide(
    trainer: Any,
    batch: Mapping[str, Any],
    inputs: Sequence[Mapping[str, Any]],
    correction: Mapping[str, Any],
) -> Applied:
    """Decide a correction over the rows of all processes, on which it must not depend.

    Args:
        trainer: A `GRPOTrainer`.
        batch: What its `_generate_and_score_completions` returned, advantages [B] included.
        inputs: Rows of the dataset, into which TRL puts what a `rollout_func` returned besides.
        correction: `preset`, `params` and `filters` of `apply`.

    Raises:
        DataError: Versions or scores are there for some rows only, or what `apply` refuses.
    """

    def everywhere(values: Tensor) -> Tensor:
        padded = trainer.accelerator.pad_across_processes(values, dim=1)
        return cast("Tensor", trainer.accelerator.gather(padded))

    saved = batch.get("old_per_token_logps")
    target = score(trainer, batch) if saved is None else saved
    mask = everywhere(action_mask(batch))
    advantages = everywhere(batch["advantages"])
    now, training = trainer.state.global_step, trainer.model.training
    size = trainer.num_generations if training else trainer.num_generations_eval
    versions, scores = rows_of(inputs, "version"), rows_of(inputs, "logp_version")
    if versions is None and trainer.rollout_func is None:
        versions = [now] * len(target)  # TRL hands the newest weights to its own generation
    version = None if versions is None else torch.tensor(versions, device=target.device)
    return apply(
        advantages,
        target=everywhere(target),
        behaviour=everywhere(batch["sampling_per_token_logps"]),
        mask=mask,
        group=torch.arange(len(advantages), device=mask.device) // size,
        version=None if version is None else everywhere(version),
        trainer_version=now,
        turn=turns(mask),
        logp_version=None if scores is None else everywhere(ragged(scores, target)),
        **correction,
    )


def action_mask(batch: Mapping[str, Any]) -> Tensor:
    """[B, T] 1 where the policy sampled the token: neither padding nor a tool's answer."""
    mask: Tensor = batch["completion_mask"] * batch.get("tool_mask", 1)
    return mask


@torch.no_grad()
def score(trainer: Any, batch: Mapping[str, Any]) -> Tensor:
    """[B, T] log π_old where TRL saves that forward; the weights are still those of μ."""
    logps, _, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
        batch["completion_ids"].shape[1],
        batch_size=trainer.args.per_device_train_batch_size,
        **{name: batch[name] for name in _FORWARD if name in batch},
    )
    return cast("Tensor", logps)


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
    """Rows of up to T values as [B, T] with NaN after their end.

    Raises:
        DataError: A row is longer than T.
    """
    padded = torch.full_like(like, torch.nan)
    for row, values in enumerate(rows):
        if len(values) > like.shape[1]:
            rule = f"no longer than {like.shape[1]}"
            raise DataError(field=f"logp_version[{row}]", rule=rule, value=len(values))
        padded[row, : len(values)] = torch.tensor(values, dtype=like.dtype)
    return padded
