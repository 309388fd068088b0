"""The records that cross package borders.

All are frozen and keyword-only; arrays are `array.array`, so that this module needs nothing but the
standard library, a record travels between processes without a copy per element, and torch or numpy
can view it without one. Positions in spans and log-probs count *action tokens* (the tokens the
policy sampled), not all tokens: what is not an action token has no log-prob here at all.

Units: `_s` seconds; times `t_*` are seconds of the machine's monotonic clock.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum


class EpisodeStatus(StrEnum):
    """How an attempt ended. Everything but FAILED and ABORTED is the agent's doing and trains."""

    DONE = "done"
    """The environment ended it and graded it."""
    TURN_LIMIT = "turn_limit"
    """The agent used all its turns; graded as it stands."""
    TRUNCATED = "truncated"
    """A turn hit max_tokens without its end-of-turn token; graded as it stands, no token added."""
    FAILED = "failed"
    """Infrastructure failed: no reward, no gradient, the task stays in the mix."""
    ABORTED = "aborted"
    """Withdrawn by the controller: timeout of its group, end of the run."""


class FailureKind(StrEnum):
    """Whose fault it was."""

    ENVIRONMENT = "environment"
    ENGINE = "engine"
    GRADER = "grader"
    DATA = "data"


class FinishReason(StrEnum):
    """Why an engine stopped sampling."""

    STOP = "stop"
    """A stop token was sampled; it is the last action token."""
    LENGTH = "length"
    """max_tokens were sampled."""
    ABORT = "abort"
    """The session was withdrawn."""


class KVState(StrEnum):
    """Which weights wrote the keys and values that a span was sampled behind."""

    FRESH = "fresh"
    """All of them the span's own version, computed once."""
    RECOMPUTED = "recomputed"
    """All of them the span's own version, computed again after a swap."""
    KEPT = "kept"
    """Some of them an older version: see `context_versions`."""


class LogprobKind(StrEnum):
    """Whether a behaviour log-prob is that of the distribution really sampled from."""

    EXACT = "exact"
    ESTIMATE = "estimate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of action tokens with one provenance, set by the engine where it is true.

    Example: an update at token 37 of 100 gives `Span(start=0, stop=37, version=4, ...)` and
    `Span(start=37, stop=100, version=5, kv=KVState.RECOMPUTED, ...)`.
    """

    start: int
    """First action token, counted within the completion or the segment that holds the span."""
    stop: int
    """One past the last action token."""
    version: int
    """Weight version that sampled these tokens."""
    engine: str
    """Id of the engine."""
    epoch: int
    """How often that engine had been (re)started."""
    precision: str
    """Arithmetic of the forward: `float32`, `bfloat16`, `bfloat16+int8` (`EngineConfig`)."""
    kv: KVState = KVState.FRESH
    context_versions: tuple[int, ...] = ()
    """Versions that wrote the cached prefix, oldest first; empty means the span's own."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    logprob_kind: LogprobKind = LogprobKind.EXACT


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How an engine samples one completion."""

    max_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no truncation."""
    key: tuple[int, ...] = (0,)
    """Key of the counter-based noise: the same key and logits give the same tokens, whatever else
    decodes beside them. Position i of the completion uses counter i."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One turn to sample: token ids in, token ids out."""

    session: str
    """Cache owner, the episode's id: the engine may reuse what it has cached for it."""
    prompt_ids: array[int]
    """All token ids before the first sampled one (`array('i')`)."""
    sampling: SamplingParams
    forced_ids: array[int] | None = None
    """Decode exactly these (`array('i')`, `max_tokens` of them, none of which stops) and return the
    log-probs that sampling them would have had; -inf outside a truncated support. Only engines
    whose `EngineInfo.forces` is true can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine sampled, with the provenance of every token."""

    session: str
    token_ids: array[int]
    """[n] sampled ids (`array('i')`), the stop token included."""
    logps: array[float]
    """[n] log-prob of each id under the distribution really sampled from (`array('f')`)."""
    spans: tuple[Span, ...]
    """Cover [0, n) without gap or overlap."""
    finish: FinishReason
    tokens_prefilled: int
    """Prompt tokens computed for this turn: the new ones only."""
    tokens_cached: int
    """Prompt tokens found in the cache."""
    tokens_recomputed: int
    """Tokens computed again because the weights changed."""
    t_submit: float
    t_start: float
    t_end: float
    replay: Replay | None = None
    """Decisions of the engine that a trainer can repeat, where it returns them."""
    rescored: tuple[Rescored, ...] = ()
    """What versions that arrived while it was sampled think of the tokens before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """Log-probs that recomputing a cache gave by the way: staleness in the engine's arithmetic."""

    version: int
    """What computed the cache again."""
    start: int
    """First of its action tokens, counted within the completion or the segment that holds it."""
    logps: array[float]
    """Of every action token from `start` to where the version took over (`array('f')`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Decisions inside the engine that a trainer can repeat, of n action tokens."""

    kept_mass: array[float] | None = None
    """[n] share of the probability that truncated sampling kept, before renormalising
    (`array('f')`)."""
    kept_ids: tuple[array[int], ...] | None = None
    """[n] the ids it kept (`array('i')` each); an empty one where nothing was truncated."""
    experts: array[int] | None = None
    """[n, layers, experts per token] routed experts, flat (`array('h')`)."""
    scales: array[float] | None = None
    """[n, linears] activation scale of every quantised linear, flat (`array('f')`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a published version."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    """64-bit additive digest in hex (`sync.digest`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """What a published version consists of; written last: if it exists, the version is whole."""

    version: int
    transport: str
    location: str
    """Where `Transport.fetch` finds it."""
    digest: str
    """Sum of the tensor digests mod 2^64, in hex."""
    tensors: tuple[TensorEntry, ...]
    nbytes: int
    n_changed: int
    """Elements that differ from the version before; 0 after an update means a hidden update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReceipt:
    """An engine's attestation that it serves a version: the digest is of its own memory."""

    engine: str
    epoch: int
    version: int
    digest: str
    t_start: float
    t_staged: float
    t_end: float
    tokens_recomputed: int
    """Prefix tokens of running sequences computed again under the new weights."""
    prepare_s: float = 0.0
    """Of the staging: quantising and repacking the verified tensors for the engine's kernels."""
    pause_s: float = 0.0
    """How long no token could be sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Who an engine is."""

    engine: str
    epoch: int
    kind: str
    precision: str
    slots: int
    version: int
    pid: int
    forces: bool = False
    """Whether it decodes `GenerateRequest.forced_ids`."""
    cache_block: int = 1
    """Tokens of a cache block: a prefix is found again in whole blocks only; 0: not at all."""
    loads: bool = True
    """Whether weights can be pushed into it; one of a foreign server refuses every `load`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What an engine did in one stretch of time."""

    t0: float
    t1: float
    tokens_decoded: int
    tokens_prefilled: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An infrastructure failure as data."""

    kind: FailureKind
    reason: str
    """Short machine-readable word: `start`, `timeout`, `worker_lost`, `bad_verdict`, ..."""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task of an environment."""

    id: str
    split: str
    """`train` or `heldout`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One exchange of an episode: what was read, sampled, and done with it."""

    t_start: float
    t_end: float
    tokens_in: int
    """Context tokens appended before this turn's first action token."""
    tokens_out: int
    tool: str = ""
    """What the environment did with the action."""
    tool_s: float = 0.0
    tool_status: str = ""
    """`ok`, `error` (the agent's), `timeout`, `cached`, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A linear run of tokens that one forward pass can hold; a plain chat is one segment."""

    token_ids: array[int]
    """[T] all ids (`array('i')`)."""
    action: array[int]
    """[T] 1 where the policy sampled the token (`array('b')`); position 0 is never an action."""
    turn: array[int]
    """[T] index of the turn a token belongs to (`array('i')`)."""
    logp_behaviour: array[float]
    """[n] behaviour log-prob of each action token (`array('f')`); NaN where missing."""
    spans: tuple[Span, ...]
    """Cover the n action tokens."""
    parent: int = -1
    """Index of the segment it branched from; -1 for the root."""
    rescored: tuple[Rescored, ...] = ()
    """What later versions think of the tokens before them, where the engine told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One attempt at one task."""

    id: str
    task: str
    group: int
    member: int
    """Index within the group, 0 ... G-1."""
    attempt: int
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    status: EpisodeStatus
    reward: float | None
    """None unless a trusted verdict exists; never 0 for a failure."""
    failure: Failure | None = None
    sandbox: str = ""
    """Backend that isolated the code it ran; `none` if nothing did."""
    counters: dict[str, int] = field(default_factory=dict)
    """Environment's counts, e.g. `reads`, `verdict_cache_hits`."""
    t_submit: float = 0.0
    t_start: float = 0.0
    t_end: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRef:
    """What the controller knows of an episode: sizes and versions, no tokens."""

    id: str
    task: str
    group: int
    member: int
    attempt: int
    status: EpisodeStatus
    reward: float | None
    failure: Failure | None
    tokens: int
    action_tokens: int
    version_min: int
    """Oldest version among its action tokens; -1 if it has none."""
    version_max: int
    spans: tuple[tuple[int, str, int, int], ...]
    """(version, engine, epoch, action tokens) in order: the provenance that the ledger keeps."""
    turns: int
    counters: dict[str, int]
    t_submit: float
    t_start: float
    t_end: float
