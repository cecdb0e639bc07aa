# SPDX-License-Identifier: Apache-2.0
"""Convert a Hugging Face model in memory, or take its Megatron checkpoint, and continue a prompt greedily.

``python hf_to_megatron_generate_text.py --hf_model_path ID [--megatron_model_path DIR] --prompt TEXT``
"""

import sys
from collections.abc import Sequence

from megatron.bridge.cli.support.exit_code import exit_code
from megatron.bridge.cli.support.parser import Parser
from megatron.bridge.cli.support.script_options import add_script_options, load_of_script


def main(argv: Sequence[str]) -> int:
    """Print the prompt with its continuation."""
    parser = Parser(description=__doc__)
    add_script_options(parser)
    parser.add_argument("--prompt", default="Hello, how are you?")
    args = parser.parse_args(argv)
    from megatron.bridge.inference.requests import Sampling
    from megatron.bridge.utils import distributed

    with load_of_script(args) as llm:
        completion = llm.generate(args.prompt, Sampling(max_new_tokens=args.max_new_tokens))[0][0]
    if distributed.rank() == 0:
        sys.stdout.write(args.prompt + completion.text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
