"""What the TRL bridge costs: of a step of GRPOTrainer, and against TRL's own expression.

The share is the mixin's own time in a training run on a CPU: the time that a trainer with it spends
in the overridden methods, less what TRL spends in the same calls. Time is the processor's, on one
thread, so that other work on the machine does not count. It needs TRL: run it by
`.trl-env/bin/python` (scripts/test-trl makes it). The ratio to TRL's expression needs nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers import trl as expression

from trueup.integrations import apply

STEPS, ROWS, LENGTH = 8, 32, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ratios, figures = against_expression()
    if importlib.util.find_spec("trl"):
        figures["step_ms"], figures["mixin_ms"] = in_a_run()
        ratios["trl.mixin_share"] = figures["mixin_ms"] / figures["step_ms"]
    else:
        figures["mixin_share"] = "not measured: TRL is not installed here, see scripts/test-trl"
    result = {"name": "trl_bridge", "ratios": ratios, "figures": figures}
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))


def against_expression(rows: int = 64, length: int = 2048) -> tuple[dict, dict]:
    """Token truncation with TRL's five figures, and `tis` with all of ours, on padded tensors."""
    gen = torch.Generator().manual_seed(0)
    target = -2 + 0.5 * torch.randn(rows, length, generator=gen)
    behaviour = (target + 0.05 * torch.randn(rows, length, generator=gen)).clamp(max=0)
    mask = (torch.rand(rows, length, generator=gen) < 0.3).int()
    advantages = torch.randn(rows, generator=gen)
    theirs = median_s(
        lambda: expression.importance_weights(target, behaviour, mask, mode="token_truncate", cap=2)
    )
    ours = median_s(
        lambda: apply(advantages, target=target, behaviour=behaviour, mask=mask, preset="tis")
    )
    return {"speed_vs_trl_expr": theirs / ours}, {
        "trl_expr_ms": theirs * 1e3,
        "ours_ms": ours * 1e3,
    }


def median_s(call: Callable[[], Any], repeats: int = 15) -> float:
    """Median processor seconds of a call, after two for warming up."""
    taken = []
    for _ in range(repeats + 2):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return statistics.median(taken[2:])


class Clock:
    """Processor seconds that each of two layers of a trainer has spent in the overridden method."""

    def __init__(self) -> None:
        self.seconds = {"with": [], "without": []}

    def layer(self, name: str) -> type:
        """A base class that times what lies below it in the order of bases."""
        taken = self.seconds[name]

        class Layer:
            def _generate_and_score_completions(self, inputs):
                start = time.process_time()
                batch = super()._generate_and_score_completions(inputs)
                taken.append(time.process_time() - start)
                return batch

        return Layer


class Generation:
    """In place of vLLM: random completions of full length."""

    def sync_weights(self) -> None:
        """Nothing to sync."""

    def generate(self, prompts, images, num_generations, profiler):
        """Ids, and log-probs near those of a uniform policy."""
        ids = torch.randint(3, 29, (len(prompts), LENGTH))
        logps = -3.4 + 0.1 * torch.randn(ids.shape)
        return prompts, ids.tolist(), [[[x] for x in row] for row in logps.tolist()], None


def in_a_run() -> tuple[float, float]:
    """Median processor milliseconds of a step, and of the mixin within it."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from datasets import Dataset
    from tiny_policy import policy, tokenizer
    from trl import GRPOConfig, GRPOTrainer

    from trueup.integrations.trl import TrueUp

    class ByVLLM:
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            self.use_vllm, self.vllm_generation = True, Generation()
            self._last_loaded_step = -1

    clock = Clock()
    Trainer = type(  # noqa: N806
        "Trainer",
        (clock.layer("with"), TrueUp, clock.layer("without"), ByVLLM, GRPOTrainer),
        {},
    )
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            folder,
            per_device_train_batch_size=ROWS,
            num_generations=8,
            max_completion_length=LENGTH,
            max_steps=STEPS,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=policy(hidden=128, layers=4),
            processing_class=tokenizer(),
            reward_funcs=lambda completions, **kwargs: [float(len(set(x))) for x in completions],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["say", "cry", "yes", "ask"] * 8}),
            correction="ais",
        )
        ends = [time.process_time()]
        measured = trainer.training_step

        def step(*given, **named):
            loss = measured(*given, **named)
            ends.append(time.process_time())
            return loss

        trainer.training_step = step
        trainer.train()
    steps = [(b - a) * 1e3 for a, b in itertools.pairwise(ends[1:])]
    own = [
        (a - b) * 1e3 for a, b in zip(clock.seconds["with"], clock.seconds["without"], strict=True)
    ]
    return statistics.median(steps), statistics.median(own[1:])


if __name__ == "__main__":
    main()
