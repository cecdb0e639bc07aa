# SPDX-License-Identifier: Apache-2.0
"""Ask a vision-language model about images: convert it in memory, or take its Megatron checkpoint.

``python hf_to_megatron_generate_vlm.py --hf_model_path ID --image_path FILE --prompt TEXT``

Each token takes a pass over the whole text.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from megatron.bridge.cli.support import model_options
from megatron.bridge.cli.support.exit_code import exit_code
from megatron.bridge.cli.support.parser import Parser
from megatron.bridge.utils.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Print the answer."""
    parser = Parser(description=__doc__)
    model_options.add_script_options(parser)
    parser.add_argument("--image_path", "--image-path", action="append", required=True, help="may be repeated")
    parser.add_argument("--prompt", default="Describe this image.")
    parser.add_argument("--vp", type=int, help="virtual pipeline stages per rank")
    args = parser.parse_args(argv)
    if args.hf_model_path is None:
        raise UserError("--hf_model_path is missing: give the model whose tokenizer and image processor are used")
    from megatron.bridge import AutoBridge
    from megatron.bridge.inference.image_prompt import answer, image_prompt
    from megatron.bridge.utils import distributed

    sizes = model_options.parallel_sizes(args)
    bridge = AutoBridge.from_hf_pretrained(args.hf_model_path, dtype=args.dtype)
    prompt = image_prompt(bridge.hf_pretrained.directory, args.image_path, args.prompt)
    tokens = answer(loaded(bridge, sizes, args), prompt, args.max_new_tokens)
    if distributed.rank() == 0:
        sys.stdout.write(prompt.hf.decode(tokens, skip_special_tokens=True) + "\n")
    return 0


def loaded(bridge: Any, sizes: dict[str, Any], args: argparse.Namespace) -> list[Any]:
    """The model's chunks of this rank, in evaluation mode."""
    if args.megatron_model_path:
        model = bridge.load_megatron_model(args.megatron_model_path, mp_overrides=sizes, wrap_with_ddp=False)
    else:
        model = model_options.build_model(bridge, sizes)
    for chunk in model:
        chunk.eval()
    return model


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
