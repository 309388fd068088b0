"""What a lying engine does not lie about is true: the contract, less what each lie is about."""

from dataclasses import replace

import pytest

from contracts.test_engine import *  # noqa: F403
from contracts.test_engine import Rig as Contract
from contracts.test_engine import (
    test_a_load_splits_the_spans_of_a_running_turn,
    test_activity_adds_up_to_the_tokens_and_is_reported_once,
    test_an_idle_session_is_recomputed_at_its_next_turn,
    test_forced_tokens_get_the_log_probs_that_sampling_them_gave,
    test_max_tokens_end_a_turn_without_inventing_a_stop_token,
    test_release_aborts_a_running_turn_and_forgets_the_session,
    test_spans_cover_all_tokens_and_name_version_and_engine,
)
from support.lying import Rig
from trueup.engines.lying import FAULTS

SPLITS = test_a_load_splits_the_spans_of_a_running_turn
IDLE = test_an_idle_session_is_recomputed_at_its_next_turn
LIES = {
    "appended_eos": {test_max_tokens_end_a_turn_without_inventing_a_stop_token},
    "dropped_logprobs": {test_forced_tokens_get_the_log_probs_that_sampling_them_gave},
    "label_by_client": {SPLITS},
    "label_off_by_one": {SPLITS, IDLE},
    "noop_quantisation": {test_spans_cover_all_tokens_and_name_version_and_engine},
    # Decodes twice, and a load waits until it has.
    "raw_logprobs": {SPLITS},
    "wrong_temperature": {SPLITS, test_activity_adds_up_to_the_tokens_and_is_reported_once},
    # Looks like an engine that recomputes, but for what only the inner engine knows.
    "kept_kv_unreported": {SPLITS},
    # Keeps caches and says so, but for those of other sessions.
    "surviving_prefix_cache": {
        SPLITS,
        IDLE,
        test_release_aborts_a_running_turn_and_forgets_the_session,
    },
}
"""Tests that a lie breaks, which are what it is about."""


LIKE_ANOTHER = {"old_tensor", "layer_skipped", "missed_update"}
"""Differ from `stale_head` in what is replaced, which the contract does not look at."""


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name in LIKE_ANOTHER else [])
        for name in FAULTS
    ]
)
def rig(request: pytest.FixtureRequest) -> Contract:
    if request.function.__name__ in {test.__name__ for test in LIES.get(request.param, ())}:
        pytest.skip("what it lies about")
    built = Rig(request.param)
    good = [built.publish(seed) for seed in (1, 2)]
    return Contract(built.engine, good, replace(built.publish(3), digest="0" * 16))
