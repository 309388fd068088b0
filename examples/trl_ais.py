"""AIS and attribution inside TRL's GRPOTrainer, on a CPU: python examples/trl_ais.py.

The policy learns to say "a"; its engine serves bfloat16 weights that are up to three steps old.
"""

from datasets import Dataset
from tiny_policy import StaleEngine, policy, tokenizer
from trl import GRPOConfig, GRPOTrainer

from trueup.diagnostics.attribution import attribution
from trueup.integrations.trl import TrueUp


class Trainer(TrueUp, GRPOTrainer):
    """GRPOTrainer with any preset of trueup."""


def count_a(completions, **kwargs):
    """Reward: the share of letters that are "a"."""
    return [text.count("a") / 16 for text in completions]


args = GRPOConfig(
    "runs/trl-ais",
    learning_rate=3e-3,
    per_device_train_batch_size=32,
    num_generations=8,
    max_completion_length=16,
    max_steps=8,
    logging_steps=4,
    use_cpu=True,
    bf16=False,
    report_to=[],
    save_strategy="no",
)
trainer = Trainer(
    model=policy(),
    processing_class=tokenizer(),
    reward_funcs=count_a,
    args=args,
    train_dataset=Dataset.from_dict({"prompt": ["say", "cry", "yes", "ask"] * 8}),
    rollout_func=StaleEngine(every=4, length=16),
    correction="ais",
)
trainer.train()
parts = attribution(trainer.gap)
logged = trainer.state.log_history[-2]
print(f"alpha {logged['trueup/adaptive/alpha']:.2f}  ESS {logged['trueup/ess/applied_tokens']:.3f}")
for name in ("total", "staleness", "engine"):
    part = getattr(parts, name)
    print(f"{name:9}  mean |d| {part.abs_mean:.4f} nats  share {part.share:6.1%}")
