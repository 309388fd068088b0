"""Any correction inside TRL's `GRPOTrainer`.

    class Trainer(TrueUp, GRPOTrainer): ...
    trainer = Trainer(..., correction="ais")

The correction is decided once per generation batch, over all processes, before TRL shuffles and
splits it, and reaches the loss as per-token advantages w_t·A_t, which every loss of TRL takes.
Nothing of TRL is imported here: the mixin overrides three of its methods and calls a fourth, whose
signatures a test pins for TRL 1.16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from trueup.corrections.method import Filters, parts
from trueup.corrections.table import find
from trueup.gap import PolicyGap
from trueup.integrations.decode import DecodeLogps
from trueup.integrations.figures import figures
from trueup.integrations.trl_batch import check_lengths, decide
from trueup.integrations.trl_limits import refuse_ignored

Route = Literal["advantages", "ratio"]
"""How weights reach the loss: inside the advantages, or as TRL's `importance_sampling_ratio`."""


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
        chosen = {"params": correction_params, "filters": correction_filters}
        self._correction, self._route = {"preset": correction, **chosen}, route
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

    def _generate(self: Any, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)  # type: ignore[misc]
        _, completion_ids, _, _, logps, *_ = generated
        check_lengths(completion_ids, logps, field="logprobs")
        return generated

    def _generate_and_score_completions(self: Any, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        applied = decide(self, batch, inputs, self._correction)
        self.gap = applied.gap
        rows, length = batch["completion_ids"].shape
        first = self.accelerator.process_index * rows
        weighted, plain, weight = (
            x[first : first + rows, :length]
            for x in (applied.advantages, applied.unweighted, applied.weight)
        )
        by_ratio = self._route == "ratio"
        batch["advantages"] = plain if by_ratio else weighted
        if "importance_sampling_ratio" in batch:
            batch["importance_sampling_ratio"] = weight if by_ratio else torch.ones_like(weight)
        logged = self._metrics["train" if self.model.training else "eval"]
        for name, value in figures(applied.metrics).items():
            logged[f"trueup/{name}"].append(value)
        return batch
