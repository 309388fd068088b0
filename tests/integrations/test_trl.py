"""The mixin inside the real GRPOTrainer of TRL, on a CPU (scripts/test-trl)."""

import inspect
import math

import pytest
import torch

pytest.importorskip(
    "trl", reason="TRL is not installed here; scripts/test-trl makes its environment"
)

from datasets import Dataset
from tiny_policy import StaleEngine, policy, tokenizer
from trl import GRPOConfig, GRPOTrainer

from trueup.corrections.table import PRESETS
from trueup.diagnostics.attribution import attribution
from trueup.errors import ConfigError, DataError
from trueup.integrations import apply
from trueup.integrations.trl import TrueUp
from trueup.integrations.trl_batch import score

pytestmark = pytest.mark.extra

PROMPTS = ["say", "cry"] * 4


def letters(completions, **kwargs):
    return [len(set(text)) for text in completions]


class Plain(GRPOTrainer):
    pass


class Corrected(TrueUp, GRPOTrainer):
    pass


class StubGeneration:
    """In place of vLLM: random completions and log-probs, the same for each trainer."""

    def sync_weights(self):
        self.synced = True

    def generate(self, prompts, images, num_generations, profiler):
        gen = torch.Generator().manual_seed(3)
        lengths = [2 + i % 5 for i in range(len(prompts))]
        ids = [torch.randint(3, 29, (n,), generator=gen).tolist() for n in lengths]
        logps = [(-3.4 + 0.6 * torch.randn(n, generator=gen)).tolist() for n in lengths]
        return prompts, ids, [[[x] for x in row] for row in logps], None


class VLLMStub:
    """Base that turns a trainer into one that generates through vLLM, after it is built."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.use_vllm, self.vllm_generation = True, StubGeneration()
        self._last_loaded_step = -1


class PlainVLLM(VLLMStub, GRPOTrainer):
    pass


class CorrectedVLLM(TrueUp, VLLMStub, GRPOTrainer):
    pass


def build(kind, tmp_path, *, rollout_func=None, loss_type="dapo", mixin=None, **settings):
    args = GRPOConfig(
        str(tmp_path),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        loss_type=loss_type,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        **settings,
    )
    trainer = kind(
        model=policy(),
        processing_class=tokenizer(),
        reward_funcs=letters,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        rollout_func=rollout_func,
        **(mixin or {}),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    return trainer


def inputs():
    return [{"prompt": "say"} for _ in range(4)] + [{"prompt": "cry"} for _ in range(4)]


def batch_of(trainer):
    torch.manual_seed(0)
    return trainer._generate_and_score_completions(inputs())


def loss_and_gradient(trainer):
    loss = trainer.compute_loss(trainer.model, batch_of(trainer))
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def parameters(owner, name):
    return list(inspect.signature(getattr(owner, name)).parameters)


def test_the_overridden_methods_of_trl_are_as_pinned():
    """A failure here means that TRL has changed under the mixin."""
    hooks = {
        "_generate_single_turn": "self prompt_ids images multimodal_fields num_generations "
        "has_tool_images",
        "_generate": "self prompts",
        "_generate_and_score_completions": "self inputs",
        "_get_per_token_logps_and_entropies": "self model input_ids attention_mask logits_to_keep "
        "batch_size compute_entropy compute_aux_loss pixel_values image_grid_thw num_images "
        "pixel_attention_mask spatial_shapes num_tiles image_sizes token_type_ids "
        "mm_token_type_ids image_position_ids",
    }
    assert {name: " ".join(parameters(GRPOTrainer, name)) for name in hooks} == hooks


def test_the_mixin_overrides_only_pinned_methods_with_their_parameters():
    own = {name for name, value in vars(TrueUp).items() if inspect.isfunction(value)}
    shared = {name for name in own if hasattr(GRPOTrainer, name)} - {"__init__"}
    assert shared == {"_generate_single_turn", "_generate", "_generate_and_score_completions"}
    for name in shared:
        assert parameters(TrueUp, name) == parameters(GRPOTrainer, name)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
def test_both_routes_give_the_same_loss_and_gradient(tmp_path, loss_type):
    found = {}
    for route in ("advantages", "ratio"):
        mixin = {"correction": "tis", "route": route}
        found[route] = loss_and_gradient(
            build(CorrectedVLLM, tmp_path, loss_type=loss_type, mixin=mixin)
        )
    plain = loss_and_gradient(
        build(CorrectedVLLM, tmp_path, loss_type=loss_type, mixin={"correction": "none"})
    )
    for part in range(2):
        torch.testing.assert_close(found["ratio"][part], found["advantages"][part])
        assert not torch.allclose(found["ratio"][part], plain[part], rtol=1e-3)


def test_tis_is_trls_own_token_truncation(tmp_path):
    """The same formula on both sides: min(ρ, 2)."""
    theirs = build(
        PlainVLLM,
        tmp_path,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
    )
    ours = build(CorrectedVLLM, tmp_path, mixin={"correction": "tis"})
    for one, other in zip(loss_and_gradient(theirs), loss_and_gradient(ours), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_is_its_decision_on_trls_tensors(tmp_path, preset):
    theirs = batch_of(build(PlainVLLM, tmp_path))
    ours = batch_of(build(CorrectedVLLM, tmp_path, mixin={"correction": preset}))
    expected = apply(
        theirs["advantages"],
        target=theirs["old_per_token_logps"],
        behaviour=theirs["sampling_per_token_logps"],
        mask=theirs["completion_mask"],
        preset=preset,
        group=torch.arange(8) // 4,
        turn=torch.ones_like(theirs["completion_mask"]),  # no tools: one turn
    )
    assert torch.equal(ours["advantages"], expected.advantages)
    assert torch.equal(ours["importance_sampling_ratio"], torch.ones_like(expected.weight))


def test_transformers_generation_is_recorded_while_it_decodes(tmp_path):
    """The same weights and numbers but for the cache: log-probs agree, and are not copies."""
    for temperature in (1.0, 0.7):
        trainer = build(Corrected, tmp_path, temperature=temperature)
        batch = batch_of(trainer)
        scored = score(trainer, batch)
        mask = batch["completion_mask"].bool()
        gap = (scored - batch["sampling_per_token_logps"])[mask]
        assert mask.sum() > 8
        assert gap.abs().max() < 1e-4
        assert trainer.gap.num_tokens == mask.sum()


def test_rows_of_a_rollout_carry_versions_and_attribution(tmp_path):
    engine = StaleEngine(every=100, length=8)
    trainer = build(Corrected, tmp_path, rollout_func=engine, mixin={"correction": "ais"})
    batch_of(trainer)
    fresh = attribution(trainer.gap)
    assert fresh.scored == trainer.gap.num_tokens == 64
    assert fresh.staleness.abs_mean < 1e-5
    assert fresh.engine.abs_mean > 1e-4  # bfloat16
    with torch.no_grad():
        for weights in trainer.model.parameters():
            weights.mul_(1.3)
    trainer.state.global_step = 2
    batch_of(trainer)
    assert set(trainer.gap.lag.tolist()) == {2}
    assert attribution(trainer.gap).staleness.abs_mean > 10 * fresh.engine.abs_mean


def scripted(prompts, logps, **extra):
    def rollout(prompts, trainer):
        rows = len(prompts)
        return {
            "prompt_ids": [[3]] * rows,
            "completion_ids": [[4, 5, 6]] * rows,
            "logprobs": [logps] * rows,
            **{name: [value] * rows for name, value in extra.items()},
        }

    return rollout


def test_tokens_of_tools_are_in_no_statistic_and_have_no_weight(tmp_path):
    rollout = scripted(PROMPTS, [-3.0, 0.0, -3.0], env_mask=[1, 0, 1])
    trainer = build(Corrected, tmp_path, rollout_func=rollout, mixin={"correction": "tis"})
    batch = batch_of(trainer)
    assert trainer.gap.num_tokens == 16
    assert set(trainer.gap.logp_behaviour.tolist()) == {-3.0}
    assert not batch["advantages"][:, 1].any()


def test_a_log_prob_that_is_none_is_excluded_and_counted(tmp_path):
    rollout = scripted(PROMPTS, [-3.0, None, -3.0])
    trainer = build(Corrected, tmp_path, rollout_func=rollout, mixin={"correction": "tis"})
    batch = batch_of(trainer)
    assert not batch["advantages"][:, 1].any()
    assert batch["advantages"].isfinite().all()
    assert trainer._metrics["train"]["trueup/excluded/missing_logp"] == [pytest.approx(1 / 3)]


def test_a_short_list_of_log_probs_is_refused(tmp_path):
    trainer = build(Corrected, tmp_path, rollout_func=scripted(PROMPTS, [-3.0, -3.0]))
    with pytest.raises(DataError, match=r"logprobs\[0\] must be of length 3, got 2"):
        batch_of(trainer)


def test_without_correction_the_loss_is_trls(tmp_path):
    mixin = {"correction": "none"}
    plain, ours = build(Plain, tmp_path), build(Corrected, tmp_path, mixin=mixin)
    for one, other in zip(loss_and_gradient(plain), loss_and_gradient(ours), strict=True):
        assert torch.equal(one, other)


def test_training_logs_raw_and_applied_figures(tmp_path):
    engine = StaleEngine(every=2, length=8)
    trainer = build(Corrected, tmp_path, rollout_func=engine, max_steps=4, num_iterations=2)
    trainer.train()
    first = trainer.state.log_history[0]
    for name in ("weight/raw/max", "weight/applied/max", "ess/applied_tokens", "adaptive/alpha"):
        assert math.isfinite(first[f"trueup/{name}"])


def test_weights_stay_while_the_update_moves(tmp_path):
    """Two iterations over one generation batch read the same weighted advantages."""
    engine = StaleEngine(every=2, length=8)
    trainer = build(Corrected, tmp_path, rollout_func=engine, num_iterations=2)
    rows = inputs()
    first = trainer._prepare_inputs(rows)["advantages"].clone()
    trainer._step += 1
    with torch.no_grad():
        for weights in trainer.model.parameters():
            weights.mul_(1.1)
    assert torch.equal(trainer._prepare_inputs(rows)["advantages"], first)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"loss_type": "vespo"}, "loss_type"),
        ({"top_p": 0.9}, "top_p"),
        ({"generation_kwargs": {"min_new_tokens": 2}}, "generation_kwargs.min_new_tokens"),
        ({"mixin": {"route": "ratio"}}, "use_vllm"),
    ],
)
def test_settings_under_which_trl_ignores_log_probs_are_refused(tmp_path, settings, field):
    with pytest.raises(ConfigError) as caught:
        build(Corrected, tmp_path, **settings)
    assert caught.value.field == field


def test_vllm_without_its_correction_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="vllm_importance_sampling_correction must be True"):
        build(CorrectedVLLM, tmp_path, vllm_importance_sampling_correction=False)
