from types import SimpleNamespace

import pytest

from trueup.errors import ConfigError
from trueup.integrations.trl_limits import refuse_ignored


def trainer(**changes):
    given = changes.pop("generation_kwargs", None)
    settings = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_importance_sampling_correction": True,
        "use_transformers_continuous_batching": False,
        "rollout_func": None,
        "loss_type": "dapo",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "args": SimpleNamespace(generation_kwargs=given),
        "accelerator": SimpleNamespace(is_main_process=True),
    }
    return SimpleNamespace(**settings | changes)


def serving(mode):
    info = {"model_config": {"logprobs_mode": mode}}
    client = SimpleNamespace(get_server_info=lambda: info)
    return {"vllm_mode": "server", "vllm_generation": SimpleNamespace(vllm_client=client)}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"vllm_importance_sampling_correction": False}, "vllm_importance_sampling_correction"),
        ({"loss_type": "vespo"}, "loss_type"),
        (
            {"use_vllm": False, "use_transformers_continuous_batching": True},
            "use_transformers_continuous_batching",
        ),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 50, "use_vllm": False}, "top_k"),
        ({"min_p": 0.05}, "min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"generation_kwargs": {"top_p": 0.9}}, "top_p"),
        ({"generation_kwargs": {"min_new_tokens": 5}}, "generation_kwargs.min_new_tokens"),
        ({"temperature": 0.6, **serving("raw_logprobs")}, "logprobs_mode"),
    ],
)
def test_what_trl_would_ignore_is_refused_by_its_name(changes, field):
    with pytest.raises(ConfigError) as caught:
        refuse_ignored(trainer(**changes), ratio=False)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_vllm": False},
        {"temperature": 0.6},
        {"temperature": 0.6, **serving("processed_logprobs")},
        {"temperature": 1.0, **serving("raw_logprobs")},
        {"generation_kwargs": {"stop": ["</a>"], "top_k": 0}},
        {"use_vllm": False, "rollout_func": print, "top_p": 0.9},
        {
            "use_vllm": False,
            "rollout_func": print,
            "use_transformers_continuous_batching": True,
        },
    ],
)
def test_what_trl_hands_on_is_accepted(changes):
    refuse_ignored(trainer(**changes), ratio=False)


def test_the_ratio_route_needs_the_setting_under_which_trl_reads_the_ratio():
    refuse_ignored(trainer(), ratio=True)
    with pytest.raises(ConfigError, match="use_vllm must be True"):
        refuse_ignored(trainer(use_vllm=False), ratio=True)
