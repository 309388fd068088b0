"""The mixin over a trainer that has TRL's methods and none of its dependencies."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from trueup.errors import ConfigError, DataError
from trueup.integrations.trl import TrueUp
from trueup.integrations.trl_batch import turns

T = torch.tensor
LN2 = math.log(2)


class FakeAccelerator:
    """Two processes, of which this is the second: the other holds the same rows in reverse."""

    process_index = 1
    is_main_process = False

    def pad_across_processes(self, values, dim):
        return values

    def gather(self, values):
        return torch.cat([values.flip(0), values])


class FakeTrainer:
    def __init__(self, *, rows, use_vllm=True, rollout_func=None):
        self.rows = rows
        self.use_vllm, self.rollout_func = use_vllm, rollout_func
        self.vllm_importance_sampling_correction = True
        self.vllm_mode, self.loss_type = "colocate", "dapo"
        self.use_transformers_continuous_batching = False
        self.temperature, self.top_p, self.top_k, self.min_p = 1.0, 1.0, 0, None
        self.repetition_penalty = 1.0
        self.args = SimpleNamespace(generation_kwargs=None, per_device_train_batch_size=2)
        self.accelerator = FakeAccelerator()
        self.model = SimpleNamespace(training=True)
        self.state = SimpleNamespace(global_step=7)
        self.num_generations, self.num_generations_eval = 2, 1
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}

    def _generate(self, prompts):
        return (None, [[5, 6], [7]], None, None, self.rows, {}, None, None)

    def _generate_and_score_completions(self, inputs):
        self._generate(inputs)
        logps = [row + [0.0] * (2 - len(row)) for row in self.rows]
        batch = {
            "prompt_ids": T([[3], [3]]),
            "prompt_mask": T([[1], [1]]),
            "completion_ids": T([[5, 6], [7, 0]]),
            "completion_mask": T([[1, 1], [1, 0]]),
            "advantages": T([1.0, -1.0]),
            "sampling_per_token_logps": T(logps),
        }
        if self.use_vllm:
            batch["old_per_token_logps"] = T([[-1.0, -1.0], [-1.0, 9.0]])
            batch["importance_sampling_ratio"] = T([[7.0, 7.0], [7.0, 7.0]])
        return batch

    def _get_per_token_logps_and_entropies(self, model, ids, mask, keep, batch_size):
        assert ids.tolist() == [[3, 5, 6], [3, 7, 0]]
        assert keep == 2
        return T([[-1.0, -1.0], [-1.0, 9.0]]), None, None


class Trainer(TrueUp, FakeTrainer):
    pass


ROWS = [[-1.0 - LN2, -1.0], [-1.0 + LN2]]
"""Ratios 2, 1 and ½."""


def test_weights_reach_the_loss_inside_the_advantages_and_trls_own_ratio_is_1():
    batch = Trainer(rows=ROWS, correction="tis")._generate_and_score_completions([{}, {}])
    assert torch.allclose(batch["advantages"], T([[2.0, 1.0], [-0.5, 0.0]]))
    assert torch.equal(batch["importance_sampling_ratio"], torch.ones(2, 2))


def test_weights_reach_the_loss_as_trls_ratio():
    made = Trainer(rows=ROWS, correction="tis", route="ratio")
    batch = made._generate_and_score_completions([{}, {}])
    assert torch.equal(batch["advantages"], T([[1.0, 1.0], [-1.0, 0.0]]))
    assert torch.allclose(batch["importance_sampling_ratio"], T([[2.0, 1.0], [0.5, 0.0]]))


def test_constants_can_be_overridden():
    made = Trainer(rows=ROWS, correction="tis", correction_params={"cap": 1.5})
    batch = made._generate_and_score_completions([{}, {}])
    assert torch.allclose(batch["advantages"], T([[1.5, 1.0], [-0.5, 0.0]]))


def test_without_log_probs_of_the_target_it_is_scored():
    made = Trainer(rows=ROWS, correction="tis", use_vllm=False, rollout_func=print)
    batch = made._generate_and_score_completions([{}, {}])
    assert torch.allclose(batch["advantages"], T([[2.0, 1.0], [-0.5, 0.0]]))
    assert "importance_sampling_ratio" not in batch


def test_raw_and_applied_figures_are_logged_over_all_processes():
    made = Trainer(rows=ROWS, correction="tis", correction_params={"cap": 1.5})
    made._generate_and_score_completions([{}, {}])
    logged = made._metrics["train"]
    assert logged["trueup/weight/raw/max"] == [pytest.approx(2)]
    assert logged["trueup/weight/applied/max"] == [1.5]
    assert logged["trueup/weight/over_cap"] == [pytest.approx(1 / 3)]
    assert logged["trueup/gap/lag"] == [0]  # TRL hands its own generation the newest weights
    assert made.gap.num_episodes == 4
    assert not made._metrics["eval"]


def test_rows_may_bring_their_version_and_its_scores():
    made = Trainer(rows=ROWS, correction="none", use_vllm=False, rollout_func=print)
    rows = [
        {"version": 5, "logp_version": [-1.25, -1.0]},
        {"version": 7, "logp_version": [-1.0]},
    ]
    made._generate_and_score_completions(rows)
    assert made.gap.lag.tolist() == [0, 2, 2, 2, 2, 0]
    assert made.gap.logp_version.tolist() == [-1.0, -1.25, -1.0, -1.25, -1.0, -1.0]


def test_lags_of_a_rollout_without_versions_are_not_claimed():
    made = Trainer(rows=ROWS, correction="none", use_vllm=False, rollout_func=print)
    made._generate_and_score_completions([{}, {}])
    assert "trueup/gap/lag" not in made._metrics["train"]


def test_a_missing_log_prob_takes_its_token_out_of_the_loss():
    made = Trainer(rows=[[math.nan, -1.0], [-1.0]], correction="tis")
    batch = made._generate_and_score_completions([{}, {}])
    assert torch.equal(batch["advantages"], T([[0.0, 1.0], [-1.0, 0.0]]))
    assert made._metrics["train"]["trueup/excluded/missing_logp"] == [pytest.approx(1 / 3)]


def test_a_turn_is_a_run_of_action_tokens():
    found = turns(T([[0, 1, 1, 0, 1], [1, 0, 0, 1, 0]]))
    assert found.tolist() == [[0, 1, 1, 1, 2], [1, 1, 1, 2, 2]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[-1.0], [-1.0]], r"logprobs\[0\] must be of length 2, got 1"),
        ([[-1.0, -1.0], []], r"logprobs\[1\] must be of length 1, got 0"),
        (None, "logprobs must be given for every completion"),
    ],
)
def test_log_probs_that_do_not_pair_with_ids_are_refused_before_trl_pads_them(rows, message):
    with pytest.raises(DataError, match=message):
        Trainer(rows=rows)._generate_and_score_completions([{}, {}])


def test_scores_that_are_longer_than_the_completions_are_refused():
    made = Trainer(rows=ROWS, use_vllm=False, rollout_func=print)
    with pytest.raises(DataError, match=r"logp_version\[1\] must be no longer than 2, got 3"):
        made._generate_and_score_completions(
            [{"version": 5, "logp_version": values} for values in ([-1.0], [-1.0] * 3)]
        )


def test_groups_are_of_the_size_that_the_mode_generates():
    made = Trainer(rows=ROWS, correction="none")
    made._generate_and_score_completions([{}, {}])
    assert made.gap.group.tolist() == [0, 0, 1, 1]
    made.model.training = False
    made._generate_and_score_completions([{}, {}])
    assert made.gap.group.tolist() == [0, 1, 2, 3]
    assert made._metrics["eval"]["trueup/kept/tokens"] == [1]


def test_versions_of_some_rows_only_are_refused():
    made = Trainer(rows=ROWS, use_vllm=False, rollout_func=print)
    with pytest.raises(DataError, match="version must be given for all 2 rows, got 1"):
        made._generate_and_score_completions([{"version": 3}, {}])


def test_a_wrong_preset_or_constant_is_refused_before_the_trainer_is_built():
    with pytest.raises(ConfigError, match="did you mean 'tis'"):
        Trainer(correction="tsi")
    with pytest.raises(ConfigError, match="cap"):
        Trainer(correction="tis", correction_params={"cap": -1.0})
