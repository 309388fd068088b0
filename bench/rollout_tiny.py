"""Rollout speed of a tiny agent on one thread: the embedded engine against transformers' generate.

The traffic is fixed: episodes of three turns (a prompt of about 12 tokens, samples of 2 or 3,
observations of about 25), 64 at a time. The engine keeps each episode's cache and refills a slot
the moment its episode ends; the peer does what trainers without an engine do, a left-padded batch
of 64 whole prefixes per turn through `generate`, sampled, with log-probs. Both sides are given the
same prompts, observations and sample lengths, so both compute the same number of samples.
Sides alternate; the ratio is the median over pairs of neighbouring runs, the other figures medians
of their own. Time is this process's processor time on one thread: what else the machine runs costs
both sides cache and clock, but no waiting.

Usage: python bench/rollout_tiny.py [--json] [--episodes N] [--repeats N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from array import array
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, LlamaForCausalLM

from trueup.engines.embedded.core import EmbeddedCore
from trueup.models.load import state_tensors
from trueup.models.tiny import build_tiny
from trueup.sync.digest import digest
from trueup.sync.inprocess import InProcessTransport
from trueup.types import GenerateRequest, SamplingParams

SLOTS, TURNS, VOCABULARY = 64, 3, 128
GOAL = 2.5


class Traffic:
    """What the world says and how long each sample is: the same for both sides."""

    def __init__(self, episodes: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.said = [
            [
                rng.integers(0, VOCABULARY, rng.integers(*span)).tolist()
                for span in ((10, 15), *[(22, 29)] * (TURNS - 1))
            ]
            for _ in range(episodes)
        ]
        self.samples = rng.integers(2, 4, (episodes, TURNS))


def build_core(model: LlamaForCausalLM) -> EmbeddedCore:
    """An engine that serves the model's weights."""
    transport = InProcessTransport()
    core = EmbeddedCore(model, engine_id="bench", slots=SLOTS, fetch=transport.fetch, digest=digest)
    core.stage(transport.publish(0, state_tensors(model)))
    core.swap()
    return core


def run_engine(core: EmbeddedCore, traffic: Traffic) -> tuple[int, int]:
    """Play all episodes; returns tokens sampled and engine steps."""
    contexts: dict[str, tuple[int, int, array[int]]] = {}

    def submit(episode: int, turn: int, context: array[int]) -> None:
        name = str(episode)
        context.extend(traffic.said[episode][turn])
        contexts[name] = (episode, turn, context)
        sampling = SamplingParams(
            max_tokens=int(traffic.samples[episode, turn]), stop_ids=(), key=(episode, turn)
        )
        core.submit(GenerateRequest(session=name, prompt_ids=context, sampling=sampling))

    for episode in range(len(traffic.said)):
        submit(episode, 0, array("i"))
    tokens = steps = 0
    while core.busy:
        steps += 1
        for completion in core.step():
            episode, turn, context = contexts.pop(completion.session)
            tokens += len(completion.token_ids)
            if turn + 1 == TURNS:
                core.release(completion.session)
            else:
                submit(episode, turn + 1, context + completion.token_ids)
    return tokens, steps


@torch.inference_mode()
def run_generate(model: LlamaForCausalLM, traffic: Traffic) -> int:
    """Play all episodes in batches of 64; returns tokens sampled."""
    tokens = 0
    for first in range(0, len(traffic.said), SLOTS):
        episodes = range(first, min(first + SLOTS, len(traffic.said)))
        contexts: dict[int, list[int]] = {episode: [] for episode in episodes}
        for turn in range(TURNS):
            for episode in episodes:
                contexts[episode] += traffic.said[episode][turn]
            width = max(map(len, contexts.values()))
            ids = torch.full((len(episodes), width), model.config.pad_token_id)
            for row, context in enumerate(contexts.values()):
                ids[row, width - len(context) :] = torch.tensor(context)
            mask = (
                torch.arange(width)
                >= torch.tensor([width - len(c) for c in contexts.values()])[:, None]
            )
            longest = int(traffic.samples[first : first + SLOTS, turn].max())
            output = model.generate(
                ids,
                attention_mask=mask.long(),
                do_sample=True,
                top_k=0,
                max_new_tokens=longest,
                min_new_tokens=longest,
                return_dict_in_generate=True,
                output_scores=True,
            )
            new = output.sequences[:, width:]
            scores = torch.stack(output.scores, 1).log_softmax(-1)
            logps = scores.gather(2, new[:, :, None])[:, :, 0].tolist()
            for row, episode in enumerate(episodes):
                n = int(traffic.samples[episode, turn])
                contexts[episode] += new[row, :n].tolist()
                tokens += len(logps[row][:n])
    return tokens


def decode_rates(model: LlamaForCausalLM, core: EmbeddedCore) -> dict[str, float]:
    """Pure decode of 64 rows behind 24 to 84 tokens: steps per second, and where a step goes."""
    rng = np.random.default_rng(1)
    prompt, n = 24, 60
    for row in range(SLOTS):
        ids = array("i", rng.integers(0, VOCABULARY, prompt).tolist())
        sampling = SamplingParams(max_tokens=n + 2, stop_ids=(), key=(row,))
        core.submit(GenerateRequest(session=f"decode-{row}", prompt_ids=ids, sampling=sampling))
    core.step()
    forward, sampler = Timed(core._network.forward), Timed(core._sample)
    core._network.forward, core._sample = forward, sampler
    step_s = _seconds(core.step, n)
    core._network.forward, core._sample = forward.call, sampler.call
    for row in range(SLOTS):
        core.release(f"decode-{row}")
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        prompts = torch.from_numpy(rng.integers(0, VOCABULARY, (SLOTS, prompt)))
        model(input_ids=prompts, cache=cache, use_cache=True)
        last = prompts[:, :1]
        bare_s = _seconds(lambda: model(input_ids=last, cache=cache, use_cache=True), n)
    shares = [timed.seconds / n / step_s for timed in (forward, sampler)]
    return {
        "decode_steps_per_s": 1 / step_s,
        "bare_forward_steps_per_s": 1 / bare_s,
        "share_forward": shares[0],
        "share_sampling": shares[1],
        "share_overhead": 1 - sum(shares),
    }


class Timed:
    """A call that adds up the seconds it takes."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        """Call and add."""
        begin = time.process_time()
        result = self.call(*arguments)
        self.seconds += time.process_time() - begin
        return result


def _seconds(call: Any, repeats: int) -> float:
    begin = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - begin) / repeats


def measure(episodes: int, repeats: int) -> dict[str, Any]:
    """Run both sides; returns the figures."""
    torch.set_num_threads(1)
    model = build_tiny(VOCABULARY, seed=0)
    core = build_core(model)
    traffic, warm = Traffic(episodes), Traffic(SLOTS, seed=1)
    run_engine(core, warm)
    run_generate(model, warm)
    engine_s, generate_s = [], []
    tokens = steps = 0
    for _ in range(repeats):
        begin = time.process_time()
        tokens, steps = run_engine(core, traffic)
        middle = time.process_time()
        peer_tokens = run_generate(model, traffic)
        generate_s.append(time.process_time() - middle)
        engine_s.append(middle - begin)
        assert peer_tokens == tokens
    figures = {
        "episodes_per_s": episodes / statistics.median(engine_s),
        "generate_episodes_per_s": episodes / statistics.median(generate_s),
        "tokens_per_s": tokens / statistics.median(engine_s),
        "steps": steps,
        **decode_rates(model, core),
    }
    ratios = {
        "tiny.speed_vs_generate": statistics.median(
            theirs / ours for theirs, ours in zip(generate_s, engine_s, strict=True)
        ),
        "tiny.decode_vs_bare_forward": figures["decode_steps_per_s"]
        / figures["bare_forward_steps_per_s"],
    }
    return {"name": "rollout_tiny", "ratios": ratios, "figures": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--episodes", type=int, default=320)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    result = measure(options.episodes, options.repeats)
    for name, value in {**result["ratios"], **result["figures"]}.items():
        goal = f"  (goal {GOAL})" if name == "tiny.speed_vs_generate" else ""
        print(f"{name:28} {value:10.3f}{goal}")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
