"""Settings of TRL under which log-probs or weights would be ignored, or mean something else.

None of them is an error to TRL: it trains on, uncorrected. Each is refused with what to change.
"""

from __future__ import annotations

from typing import Any

from trueup.errors import ConfigError

_FULL_SUPPORT = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
"""Sampling settings under which softmax(logits / temperature) itself is sampled from."""

_HARMLESS = {
    *("max_new_tokens", "max_tokens", "max_length", "max_time", "seed", "detokenize"),
    *("stop", "stop_strings", "stop_token_ids", "include_stop_str_in_output"),
    *("use_cache", "cache_implementation", "cache_config"),
}
"""Further `generation_kwargs` that leave the distribution of a token as it is."""


_NOT_COMPARABLE = "log-probs of another distribution than softmax(logits / temperature)"


def refuse_ignored(trainer: Any, *, ratio: bool) -> None:
    """Refuse a trainer whose correction would not be what it says.

    Args:
        trainer: A built `GRPOTrainer`.
        ratio: Weights are to reach the loss as `importance_sampling_ratio`.

    Raises:
        ConfigError: With the setting and the value it must have.
    """
    vllm, own = trainer.use_vllm, trainer.rollout_func is not None
    if vllm and not trainer.vllm_importance_sampling_correction:
        raise _must(
            trainer,
            "vllm_importance_sampling_correction",
            "True: TRL drops vLLM's log-probs otherwise",
        )
    if ratio and not vllm:
        raise _must(trainer, "use_vllm", "True for route 'ratio': TRL ignores the ratio otherwise")
    if trainer.loss_type == "vespo":
        raise _must(trainer, "loss_type", "another one: vespo weights the same gap by itself")
    if trainer.use_transformers_continuous_batching and not own:
        raise _must(
            trainer, "use_transformers_continuous_batching", "False: it returns no log-probs"
        )
    if own and not vllm:
        return  # it samples by itself, with settings of its own
    given = dict(trainer.args.generation_kwargs or {})
    for name, neutral in _FULL_SUPPORT.items():
        value = given.pop(name, getattr(trainer, name))
        if value not in (neutral, None):
            raise ConfigError(field=name, rule=f"{neutral}: {_NOT_COMPARABLE}", value=value)
    for name in sorted(given.keys() - _HARMLESS):
        rule = f"absent: {_NOT_COMPARABLE}"
        raise ConfigError(field=f"generation_kwargs.{name}", rule=rule, value=given[name])
    asks = vllm and trainer.vllm_mode == "server" and trainer.accelerator.is_main_process
    if asks and trainer.temperature != 1:
        server = trainer.vllm_generation.vllm_client.get_server_info()
        mode = server["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            rule = "processed_logprobs: raw ones are of temperature 1"
            raise ConfigError(field="logprobs_mode", rule=rule, value=mode)


def _must(trainer: Any, name: str, rule: str) -> ConfigError:
    return ConfigError(field=name, rule=rule, value=getattr(trainer, name))
