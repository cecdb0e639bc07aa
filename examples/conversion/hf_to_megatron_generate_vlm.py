# SPDX-License-Identifier: Apache-2.0
"""Ask a vision-language model about images: convert it in memory, or take its Megatron checkpoint.

``python hf_to_megatron_generate_vlm.py --hf_model_path ID --image_path FILE --prompt TEXT``
"""

import sys
from collections.abc import Sequence

from megatron.bridge.cli.support.exit_code import exit_code
from megatron.bridge.cli.support.parser import Parser
from megatron.bridge.cli.support.script_options import add_script_options, load_of_script


def main(argv: Sequence[str]) -> int:
    """Print the answer."""
    parser = Parser(description=__doc__)
    add_script_options(parser)
    parser.add_argument(
        "--image_path", "--image-path", action="append", required=True, help="may be repeated"
    )
    parser.add_argument("--prompt", default="Describe this image.")
    args = parser.parse_args(argv)
    from megatron.bridge.inference.prompts import as_messages
    from megatron.bridge.inference.requests import Sampling
    from megatron.bridge.utils import distributed

    with load_of_script(args) as llm:
        completion = llm.chat(
            as_messages(args.prompt, args.image_path), Sampling(max_new_tokens=args.max_new_tokens)
        )
    if distributed.rank() == 0:
        sys.stdout.write(completion.text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
