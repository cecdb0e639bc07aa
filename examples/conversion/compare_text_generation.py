# SPDX-License-Identifier: Apache-2.0
"""Continue a prompt greedily with transformers and with Megatron, and compare the tokens.

``python compare_text_generation.py --hf_model_path ID [--megatron_model_path DIR] [--prompt TEXT]``
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from megatron.bridge.cli.support.exit_code import exit_code
from megatron.bridge.cli.support.parser import Parser
from megatron.bridge.cli.support.script_options import add_script_options, load_of_script
from megatron.bridge.utils.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Print both texts; the exit code is 1 if their tokens differ."""
    parser = Parser(description=__doc__)
    add_script_options(parser)
    parser.add_argument("--prompt", default="Hello, how are you?")
    args = parser.parse_args(argv)
    if args.hf_model_path is None:
        raise UserError("transformers needs a model: give --hf_model_path")
    from megatron.bridge.inference.requests import Sampling
    from megatron.bridge.utils import distributed

    with load_of_script(args) as llm:
        ours = llm.generate(args.prompt, Sampling(max_new_tokens=args.max_new_tokens))[0][0]
    if distributed.rank() != 0:
        return 0
    theirs, text = of_transformers(args, ours.prompt_tokens)
    same = theirs == ours.tokens
    sys.stdout.write(f"transformers: {text}\nMegatron:     {ours.text}\n")
    sys.stdout.write("the same tokens\n" if same else "NOT the same tokens\n")
    return 0 if same else 1


def of_transformers(args: argparse.Namespace, prompt: list[int]) -> tuple[list[int], str]:
    """Tokens and text that transformers generates."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype: Any = getattr(torch, args.dtype) if args.dtype else "auto"
    remote = {"trust_remote_code": args.trust_remote_code}
    model: Any = AutoModelForCausalLM.from_pretrained(
        args.hf_model_path, dtype=dtype, **remote
    ).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(args.hf_model_path, **remote)
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=args.max_new_tokens, do_sample=False
    )
    tokens = found[0, len(prompt) :].tolist()
    return tokens, tokenizer.decode(tokens, skip_special_tokens=True)


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
