# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge upcycle``: a mixture of experts from a dense model."""

import argparse

from megatron.bridge.cli.support import text_format
from megatron.bridge.cli.support.options import add_new_model_folder, add_source_model
from megatron.bridge.cli.support.parser import Parser, count

DESCRIPTION = (
    "Make a mixture of experts from a dense Hugging Face model. Its outputs are those of the dense "
    "model before the first step, so it continues from what the dense model has learned. Llama and "
    "Mistral become Mixtral, Qwen3 becomes Qwen3-MoE."
)
EXAMPLES = """examples:
  megatron-bridge upcycle --hf-model Qwen/Qwen3-0.6B --hf-path upcycled --experts 8 --active 2
  megatron-bridge upcycle --hf-model DIR --hf-path upcycled --experts 64 --active 8 --granularity 8
"""


def add_arguments(parser: Parser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add_source_model(parser, "directory or hub id of the dense model")
    add_new_model_folder(parser)
    parser.add_argument(
        "--experts", type=count, required=True, metavar="N", help="experts of a layer"
    )
    parser.add_argument(
        "--active", type=count, required=True, metavar="N", help="experts of a token"
    )
    parser.add_argument(
        "--granularity",
        type=count,
        default=1,
        metavar="N",
        help="slices of the dense MLP, of which an expert has one (default: 1, the complete MLP)",
    )
    parser.add_argument(
        "--seed", type=int, default=1234, help="seed of the routers' weights (default: 1234)"
    )


def run(args: argparse.Namespace) -> int:
    from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
    from megatron.bridge.models.surgery.upcycling import UpcyclingPlan, upcycle

    plan = UpcyclingPlan(args.experts, args.active, args.granularity, args.seed)
    architecture = upcycle(PreTrainedCausalLM(args.hf_model), args.hf_path, plan)
    text_format.say(
        f"{args.hf_path}: {architecture} with {plan.experts} experts, {plan.active} of them for each token"
    )
    return 0
