"""The table of correction presets.

To add one: an entry in `PRESETS` of a file of its own kind (or of a new file, and its line here).
It is then accepted by `correct`, explained by `explain`, has a page in docs/corrections, and is run
by the contract suite.
"""

from __future__ import annotations

from collections.abc import Mapping

from trueup.corrections import adaptive, divergence, masked, moment, signed, truncated
from trueup.corrections.preset import Preset, Scope, unknown

_FILES = (truncated, masked, divergence, signed, moment, adaptive)

PRESETS: Mapping[str, Preset] = {preset.name: preset for file in _FILES for preset in file.PRESETS}
"""Every preset by name."""

FILTERS: Mapping[str, Preset] = {
    name: preset for name, preset in PRESETS.items() if preset.filter is not None
}
"""The presets that reject, and whose filter can be put before the weights of another."""

ALIASES: Mapping[str, str] = {
    "icepop": "mis",
    "k1-mean": "geo",
    # verl: rollout_is and rollout_rs
    "token": "tis",
    "sequence": "seq-tis",
    "token_k1": "k1-token",
    "token_k2": "k2-token",
    "token_k3": "k3-token",
    "seq_sum_k1": "k1-sum",
    "seq_sum_k2": "k2-sum",
    "seq_sum_k3": "k3-sum",
    "seq_mean_k1": "geo",
    "seq_mean_k2": "k2-mean",
    "seq_mean_k3": "k3-mean",
    "seq_max_k2": "k2-max",
    "seq_max_k3": "k3-max",
    "binary_kl": "kpop",
    # TRL: vllm_importance_sampling_mode
    "token_truncate": "tis",
    "token_mask": "mis",
    "sequence_truncate": "seq-tis",
    "sequence_mask": "seq-mis",
}
"""Names that others give to the same method. The constants are those of our table."""

_FUSED = "nothing with 1 optimiser step per step batch{}; else 1 forward per token for log π_old"
PRICE: Mapping[Scope, str] = {
    "token": _FUSED.format(""),
    "sequence": _FUSED.format(", whole episodes in a micro-batch"),
    "group": _FUSED.format(", whole groups in a micro-batch"),
    "batch": "1 forward per token for log π_old of the whole step batch, before the update's own",
}
"""What a preset costs, by scope."""


def find(name: str) -> Preset:
    """The preset of that name, or of that name elsewhere.

    Raises:
        ConfigError: There is none; names the nearest.
    """
    name = ALIASES.get(name, name)
    if name not in PRESETS:
        raise unknown("correction.preset", name, [*PRESETS, *ALIASES])
    return PRESETS[name]


def find_filter(name: str) -> Preset:
    """The preset of that name, whose filter is wanted.

    Raises:
        ConfigError: There is none, or it rejects nothing; names the nearest.
    """
    name = ALIASES.get(name, name)
    if name not in FILTERS:
        raise unknown("correction.filters", name, list(FILTERS))
    return FILTERS[name]


def aliases_of(name: str) -> list[str]:
    """Other names of a preset."""
    return [alias for alias, meant in ALIASES.items() if meant == name]


def explain(name: str) -> str:
    """What a preset computes, why, where it is from, and what it costs.

    Raises:
        ConfigError: There is no such preset.
    """
    preset = find(name)
    lines = [
        f"{preset.name}: {preset.formula}",
        preset.meaning,
        preset.use,
        f"level {preset.level.name}, scope {preset.scope}; source: {preset.source}",
    ]
    for key, item in preset.constants.items():
        usual = f"; in use: {item.usual}" if item.usual else ""
        lines.append(f"{key} = {item.default:g}: {item.meaning} ({item.allowed}{usual})")
    if others := aliases_of(preset.name):
        lines.append(f"also called {', '.join(others)}")
    if preset.moving:
        lines.append(MOVING)
    lines.append(f"price: {PRICE[preset.scope]}")
    return "\n".join(lines)


MOVING = (
    "the source takes the ratio of the moving π_θ; here it is taken once per step batch, at π_old"
)
"""Said of a preset whose source differs in that."""
