"""The correction that a configuration asks for, as a function of a gap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from trueup.config import Config
from trueup.corrections.base import Correction
from trueup.corrections.compose import NORMALIZE, apply
from trueup.corrections.controllers import at_floor, without_weights
from trueup.corrections.method import widest
from trueup.corrections.preset import Preset, Scope
from trueup.corrections.statistics import correction_metrics
from trueup.corrections.table import find, find_filter
from trueup.diagnostics.metrics import Metric, metric_of
from trueup.gap import PolicyGap

if TYPE_CHECKING:
    from torch import Tensor

_OFF = "off"
"""The gate of `correction.off_below`."""


class Method:
    """Corrects gaps as `correction` and `train` say.

    With `correction.gate = "previous"` it remembers what the last step batch decided; the first one
    of a process decides for itself. In bypass mode a preset rejects and does not weigh.

    Args:
        config: The run.

    Raises:
        ConfigError: The preset or a filter is unknown.
    """

    def __init__(self, config: Config) -> None:
        """Nothing is remembered yet."""
        chosen = config.correction
        preset = find(chosen.preset)
        self._config = config
        self._preset = without_weights(preset) if config.train.mode == "bypass" else preset
        self._chosen = (self._preset, *(find_filter(name) for name in chosen.filters))
        self._gates: Mapping[str, float] = {}

    @property
    def scope(self) -> Scope:
        """Whose log-probs must be known now before a token's term of the loss is."""
        chosen = self._config.correction
        if (
            any(x.scope == "batch" and not self._knows(x) for x in self._chosen)
            or (chosen.normalize and NORMALIZE not in self._gates)
            or (chosen.off_below and _OFF not in self._gates)
        ):
            return "batch"
        scopes: list[Scope] = ["token" if self._knows(x) else x.scope for x in self._chosen]
        return widest(scopes)

    @property
    def fuses(self) -> bool:
        """Whether log π_old may now be that of the update's forward (docs/design/fusion.md)."""
        train, chosen = self._config.train, self._config.correction
        one_update = train.fused and train.minibatches == 1
        return one_update and self.scope != "batch" and chosen.on == "total"

    def __call__(self, gap: PolicyGap) -> Correction:
        """Correct a step batch, with its metrics."""
        made = self._correct(gap, gates=self._gates)
        metrics = dict(made.metrics)
        chosen = self._config.correction
        if self._gates:
            own = self._correct(gap, gates={}, record=False)
            metrics["gate/error"] = metric_of((made.weight - own.weight).abs(), own.counts)
        if chosen.off_below:
            off = self._gates.get(_OFF, made.gates[_OFF])
            metrics["correction/off"] = Metric.of(off)
        if chosen.gate == "previous":
            self._gates = {**self._gates, **made.gates}
        return replace(made, metrics=metrics)

    def part(self, gap: PolicyGap, baseline: Tensor | None) -> Correction:
        """Correct a part of a step batch that holds whole units of the scope, without metrics.

        Args:
            gap: Whose tokens.
            baseline: [E] bool, the episodes that the baselines know of, where the gap cannot say.
        """
        return self._correct(gap, gates=self._gates, record=False, baseline=baseline)

    def _knows(self, preset: Preset) -> bool:
        """A batch before decided its number."""
        return preset.gated and preset.name in self._gates

    def _correct(
        self,
        gap: PolicyGap,
        *,
        gates: Mapping[str, float],
        record: bool = True,
        baseline: Tensor | None = None,
    ) -> Correction:
        config, chosen = self._config, self._config.correction
        floor = chosen.off_below
        own_off = float(at_floor(gap, floor=floor)) if floor else 0.0
        off = bool(gates.get(_OFF, own_off))
        masks = config.schedule.consume == "mask"
        made = apply(
            gap,
            find("none") if off else self._preset,
            params={} if off else chosen.params,
            advantage=config.train.advantage,
            zero_variance=config.train.zero_variance,
            denominator=chosen.denominator,
            max_lag=config.staleness_bound if masks else None,
            filters={} if off else chosen.filters,
            on=chosen.on,
            normalize=chosen.normalize and not off,
            baseline=baseline,
            record=correction_metrics if record else None,
            gates=gates,
        )
        return replace(made, gates={**made.gates, _OFF: own_off}) if floor else made
