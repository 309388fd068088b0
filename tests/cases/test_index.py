"""Known failures of the field, by number, and the test that shows the right outcome of each.

C: corrections and statistics (`test_corrections.py` beside this file, by number). V: versions and
staleness. L: lifecycle. A case that lies in the suite of its module is named here.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

CASES = {
    "V1": (
        "training/test_rollout.py",
        "test_a_version_that_arrives_before_the_first_token_is_the_only_one",
    ),
    "V2": (
        "training/test_rollout.py",
        "test_an_update_at_token_37_of_100_splits_the_span_there",
    ),
    "V3": (
        "training/test_controller.py",
        "test_without_staleness_and_delay_every_lag_is_0_and_no_episode_spans_two_versions",
    ),
    "V4": (
        "training/test_controller.py",
        "test_an_episode_that_finished_at_v0_and_is_consumed_at_v5_waited_in_the_queue",
    ),
    "V5": (
        "training/test_controller.py",
        "test_a_resumed_run_admits_staleness_plus_one_batches_with_fresh_group_ids",
    ),
    "V6": (
        "training/test_controller.py",
        "test_groups_without_contrast_are_refunded_so_that_the_mean_lag_stays_within_the_bound",
    ),
    "L1": (
        "training/test_controller.py",
        "test_every_draw_is_trained_once_over_two_interrupts",
    ),
    "L4": (
        "training/test_controller.py",
        "test_crashed_members_are_retried_and_then_the_group_is_trained_without_them",
    ),
    "L5": (
        "training/test_controller.py",
        "test_a_stuck_member_is_withdrawn_when_its_group_is_due",
    ),
    "L6": (
        "environments/test_grading.py",
        "test_other_rewards_are_faults",
    ),
    "L7": (
        "records/test_lock.py",
        "test_the_second_controller_is_told_the_pid_of_the_first",
    ),
    "V7": (
        "contracts/test_transport.py",
        "test_a_mixture_of_two_versions_is_refused",
    ),
    "V8": (
        "training/test_learner.py",
        "test_v08_a_mismatch_that_grows_at_learning_rate_0_is_a_stale_cache",
    ),
    "V9": (
        "contracts/test_transport.py",
        "test_updating_the_live_tensors_does_not_change_what_was_published",
    ),
    "V10": (
        "contracts/test_transport.py",
        "test_an_update_too_small_for_the_dtype_is_a_hidden_update",
    ),
    "L10": (
        "reports/test_html.py",
        "test_what_the_run_wrote_is_shown_as_text",
    ),
    "L9": (
        "test_config.py",
        "test_an_unknown_key_names_its_nearest_neighbour",
    ),
    "L11": (
        "training/test_rollout.py",
        "test_ids_log_probs_and_spans_are_of_one_length_whatever_happens",
    ),
    "L12": (
        "training/test_rollout.py",
        "test_a_turn_cut_by_its_length_is_graded_as_it_stands_without_an_invented_end",
    ),
}


@pytest.mark.parametrize("number", CASES)
def test_the_case_has_a_test(number: str) -> None:
    file, name = CASES[number]
    tree = ast.parse((TESTS / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
