# SPDX-License-Identifier: Apache-2.0
"""Load a model in vLLM and print its answers; runs in vLLM's own environment (``scripts/vllm.sh``).

usage: python -P vllm_answers.py JOB, a JSON file with ``folder``, ``kind`` (generate, classify, embed), ``prompts``
(token ids) and optionally ``adapter``
"""

import json
import os
import sys
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
)
MARK = "ANSWERS "
TOKENS = 8


def answers_of(job):
    """Return greedy tokens with log-probabilities, probabilities of classes, or embeddings of each prompt."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    options = {} if job["kind"] == "generate" else {"runner": "pooling"}
    adapter = job.get("adapter")
    if adapter:
        options |= {"enable_lora": True, "max_lora_rank": 8}
    llm = LLM(
        model=job["folder"],
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        skip_tokenizer_init=job["kind"] != "embed",  # vLLM embeds only with a tokenizer
        enforce_eager=True,
        **options,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    if job["kind"] == "classify":
        return [list(map(float, output.outputs.probs)) for output in llm.classify(prompts)]
    if job["kind"] == "embed":
        return [list(map(float, output.outputs.embedding)) for output in llm.embed(prompts)]
    greedy = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0
    )
    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    completions = [output.outputs[0] for output in llm.generate(prompts, greedy, lora_request=lora)]
    return [
        {
            "tokens": list(completion.token_ids),
            "logprobs": [next(iter(row.values())).logprob for row in completion.logprobs],
        }
        for completion in completions
    ]


if __name__ == "__main__":
    sys.stdout.write(f"{MARK}{json.dumps(answers_of(json.loads(Path(sys.argv[1]).read_text())))}\n")
