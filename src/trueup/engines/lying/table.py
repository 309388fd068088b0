"""The faults that can be planted, by name.

To add one: write a subclass of `LyingEngine` that overrides what it lies about, in the file of its
family, add one entry here, and test by hand what it says and that the rest is true.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from trueup.config import EngineConfig
from trueup.engines import table
from trueup.engines.base import Engine
from trueup.engines.lying.caches import SurvivingPrefixCache, UnreportedKeptKV
from trueup.engines.lying.engine import LyingEngine
from trueup.engines.lying.forge import Forge
from trueup.engines.lying.labels import LabelByClient, LabelOffByOne
from trueup.engines.lying.sampling import RawLogprobs, UnreportedTopP, WrongTemperature
from trueup.engines.lying.tokens import AppendedEos, DroppedLogprobs, ShiftedLogprobs
from trueup.engines.lying.weights import (
    MissedUpdate,
    NoopQuantisation,
    OldTensor,
    SkippedLayer,
    StaleHead,
)
from trueup.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from trueup.types import WeightManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One lie."""

    meaning: str
    """What the engine does, and says instead."""
    seen: str
    """What a user would see, and when."""
    planted: str
    """How it is brought about in an honest engine."""
    lie: type[LyingEngine]
    demands: Mapping[str, str] = field(default_factory=dict)
    """Keys of `EngineConfig` that the inner engine must have."""


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "stale_head": Fault(
            meaning="after a load the output head is still that of the version before",
            seen="fresh tokens are off by far more than the floor after the first update, by "
            "nothing before it; the digest is right",
            planted="the head's tensors are replaced before the engine loads them",
            lie=StaleHead,
        ),
        "old_tensor": Fault(
            meaning="after a load one matrix is still that of the version before",
            seen="a small excess over the floor that grows with the size of the updates; the "
            "digest is right",
            planted="one tensor is replaced before the engine loads it",
            lie=OldTensor,
        ),
        "layer_skipped": Fault(
            meaning="one block is not computed",
            seen="a large gap from the first token on, updates or not",
            planted="what one block adds to the residual stream is loaded as zeros",
            lie=SkippedLayer,
        ),
        "missed_update": Fault(
            meaning="an update is acknowledged and does not arrive: v − 1 is served as v",
            seen="at small steps nothing but the slope of the label test, which is 1; at large "
            "ones an engine term that looks like one version of staleness",
            planted="each load is given the tensors of the load before",
            lie=MissedUpdate,
        ),
        "label_off_by_one": Fault(
            meaning="tokens sampled by v are labelled with the version loaded before",
            seen="spans of an idle engine that contradict the version it says it serves; "
            "staleness that is too large by one version",
            planted="the version of every span is rewritten",
            lie=LabelOffByOne,
        ),
        "label_by_client": Fault(
            meaning="a whole reply is labelled with the version served when it arrives",
            seen="replies over a load have one span; their first tokens fit an older version",
            planted="the spans of a reply are merged when it is handed over",
            lie=LabelByClient,
        ),
        "noop_quantisation": Fault(
            meaning="a quantisation is accepted, reported, and not done",
            seen="a quantised engine at the floor of the unquantised one, at its speed",
            planted="`+int8` is added to the precision that an unquantised engine reports, and the "
            "float32 that it is sent is rounded to what it computes in",
            lie=NoopQuantisation,
            demands={"quantize": "none"},
        ),
        "wrong_temperature": Fault(
            meaning="tokens are sampled at another temperature; log-probs are those at the one "
            "that was asked for, and so is what is reported",
            seen="log-probs agree with the trainer's token by token, but tokens are more (or "
            "less) probable than draws from them can be",
            planted="sampled at 0.7 or 1.4 of the temperature, then decoded again as given",
            lie=WrongTemperature,
        ),
        "raw_logprobs": Fault(
            meaning="log-probs are those before temperature and truncation",
            seen="nothing at temperature 1; otherwise a gap that no version explains",
            planted="sampled as asked, then decoded again as given at temperature 1",
            lie=RawLogprobs,
        ),
        "top_p_unreported": Fault(
            meaning="samples with top-p 0.9 whatever is asked, and reports none",
            seen="mean ratio below 1 (z), behaviour log-probs above the trainer's by up to 0.105",
            planted="the request is rewritten on its way in and the spans on their way out",
            lie=UnreportedTopP,
        ),
        "kept_kv_unreported": Fault(
            meaning="keys and values survive a swap, and spans say they were computed again",
            seen="an excess over the floor only in tokens that follow a swap within a session",
            planted="an engine that keeps them has its spans rewritten",
            lie=UnreportedKeptKV,
            demands={"kv_mode": "keep"},
        ),
        "surviving_prefix_cache": Fault(
            meaning="the prefix cache is not emptied by a load",
            seen="an excess over the floor only for prompts that were seen before the load",
            planted="released sessions stay in an engine that keeps caches, and new ones with "
            "such a prompt take them over",
            lie=SurvivingPrefixCache,
            demands={"kv_mode": "keep"},
        ),
        "appended_eos": Fault(
            meaning="a stop token that nobody sampled ends replies that were cut off",
            seen="no reply is ever truncated, and last tokens have a ratio near 0",
            planted="one token fewer is sampled, and the stop token put behind with log-prob 0",
            lie=AppendedEos,
        ),
        "shifted_logprobs": Fault(
            meaning="every token has the log-prob of the one before it",
            seen="a large gap whose mean is near 0",
            planted="the log-probs of a reply are rotated by one",
            lie=ShiftedLogprobs,
        ),
        "dropped_logprobs": Fault(
            meaning="a share of the tokens has no log-prob",
            seen="NaN, which is counted, or exactly 0.0, which is no probability of a sampled "
            "token",
            planted="5, 10 or 20 % of the log-probs are overwritten with the one or the other",
            lie=DroppedLogprobs,
        ),
    }
)
"""Name -> fault."""


def plant(inner: Engine, fault: str, *, seed: int, forge: Forge) -> Engine:
    """Plant a fault in an engine.

    Args:
        inner: An engine that nothing was loaded into, built with `forge` as its `fetch` and with
            what `FAULTS[fault].demands`; the engine returned owns it.
        fault: One of `FAULTS`.
        seed: Decides what the fault leaves open; equal seeds plant the same.
        forge: What `inner` reads versions by.

    Raises:
        ConfigError: No fault has this name.
    """
    return _known(fault).lie(inner, seed=seed, forge=forge)


def planting(fault: str, *, seed: int) -> table.Build:
    """A factory that builds an engine of the table as the fault demands it, and plants the fault.

    Raises:
        ConfigError: No fault has this name.
    """
    demands = _known(fault).demands

    def build(
        config: EngineConfig,
        *,
        model: Path,
        engine_id: str,
        epoch: int,
        fetch: Callable[[WeightManifest], dict[str, Tensor]],
        digest: Callable[[Mapping[str, Tensor]], str],
        paced: bool,
    ) -> Engine:
        forge = Forge(fetch, digest)
        inner = table.factory(config.kind)(
            EngineConfig.model_validate({**config.model_dump(), **demands}),
            model=model,
            engine_id=engine_id,
            epoch=epoch,
            fetch=forge,
            digest=digest,
            paced=paced,
        )
        return plant(inner, fault, seed=seed, forge=forge)

    return build


def _known(fault: str) -> Fault:
    if fault not in FAULTS:
        raise ConfigError(field="fault", rule=f"one of {sorted(FAULTS)}", value=fault)
    return FAULTS[fault]
