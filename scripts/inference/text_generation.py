# SPDX-License-Identifier: Apache-2.0
"""Continue prompts, with the options of the Megatron Bridge API; ``megatron-bridge generate`` has more.

``python text_generation.py --hf_model_path ID [--megatron_model_path DIR] --prompt TEXT``
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.bridge.cli.support.exit_code import exit_code
from megatron.bridge.cli.support.parser import Parser, count
from megatron.bridge.cli.support.script_options import (
    add_engine_options,
    add_script_options,
    load_of_script,
    script_engine,
)

WITHOUT_EFFECT = {
    "--use-legacy-generation": "there is only one engine",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--cache-mla-latents": "latents are always cached",
    "--sequence-parallel": "the rows of a step are not split",
}
WITHOUT_EFFECT_OF_VALUE = {
    "--block_size_tokens": "a text occupies consecutive rows of the caches",
    "--attention-backend": "there is only one attention with caches",
    "--inference-moe-token-dispatcher-type": "experts use the dispatcher of training",
    "--distributed-timeout-minutes": "a rank that ends is detected at once",
    "--coordinator-host": "processes communicate through pipes",
    "--coordinator-port": "processes communicate through pipes",
}


def parsed(argv: Sequence[str], description: str | None = __doc__) -> argparse.Namespace:
    """Read the options."""
    parser = Parser(description=description)
    add_script_options(parser)
    add_engine_options(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", help="may be repeated")
    source.add_argument(
        "--prompt-file", type=Path, help="JSONL with text or prompt, or a prompt a line"
    )
    parser.add_argument(
        "--prompt-file-num-truncate", type=count, help="read this many prompts only"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_k", "--top-k", type=int, default=1)
    parser.add_argument(
        "--top_p", "--top-p", type=float, default=0.0, help="0 keeps all tokens, as 1 does"
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument("--return-log-probs", action="store_true")
    parser.add_argument("--skip-prompt-log-probs", action="store_true")
    parser.add_argument("--top-n-logprobs", type=int, default=0)
    parser.add_argument("--termination-id", type=int, help="a further token that ends a text")
    parser.add_argument("--stop-words", nargs="+", default=[])
    for name, reason in WITHOUT_EFFECT.items():
        parser.add_argument(name, action="store_true", help=f"no effect: {reason}")
    for name, reason in WITHOUT_EFFECT_OF_VALUE.items():
        parser.add_argument(name, metavar="VALUE", help=f"no effect: {reason}")
    args = parser.parse_args(argv)
    for name, reason in {**WITHOUT_EFFECT, **WITHOUT_EFFECT_OF_VALUE}.items():
        if getattr(args, name.strip("-").replace("-", "_")):
            sys.stderr.write(f"note: {name} has no effect: {reason}\n")
    return args


def record_of(prompt: Any, found: Any, sampling: Any) -> dict[str, Any]:
    """The JSON object of a completion."""
    record = {"prompt": prompt, "text": found.text, "tokens": found.tokens}
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) is not None:
            record[name] = [one.logprob for one in getattr(found, name)]
    return record


def sampling_of(args: argparse.Namespace) -> Any:
    """The ``Sampling`` of the arguments."""
    from megatron.bridge.inference.requests import Sampling

    top = args.top_n_logprobs if args.return_log_probs else None
    return Sampling(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p or 1.0,
        seed=args.seed,
        stop=args.stop_words,
        stop_ids=[] if args.termination_id is None else [args.termination_id],
        logprobs=top,
        prompt_logprobs=None if args.skip_prompt_log_probs else top,
    )


def prompts_of(args: argparse.Namespace) -> list[Any]:
    """The prompts, from the command or from a file."""
    if args.prompt_file is None:
        return args.prompt
    from megatron.bridge.inference.prompt_files import read_prompts

    return [line.prompt for line in read_prompts(args.prompt_file, {})][
        : args.prompt_file_num_truncate
    ]


def main(argv: Sequence[str]) -> int:
    """Print a JSON object for each prompt."""
    args = parsed(argv)
    from megatron.bridge.utils import distributed

    prompts, sampling = prompts_of(args), sampling_of(args)
    with load_of_script(args, **script_engine(args)) as llm:
        for prompt, completions in zip(prompts, llm.generate_each(prompts, sampling), strict=True):
            if distributed.rank() == 0:
                sys.stdout.write(
                    json.dumps(record_of(prompt, completions[0], sampling), ensure_ascii=False)
                    + "\n"
                )
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
