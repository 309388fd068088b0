"""The other end of `rollout_sides.vllm_cpu`: runs in vLLM's environment, imports nothing of ours.

Usage: python vllm_child.py MODEL, then a JSON object per line on stdin.
"""

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM also logs to stdout
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1],
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=64,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=request["max_tokens"],
            stop_token_ids=request["stop_ids"],
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = sum(len(output.outputs[0].logprobs) for output in outputs)
        print(json.dumps({"tokens": tokens, "seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
