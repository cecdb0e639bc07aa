# SPDX-License-Identifier: Apache-2.0
"""Convert a checkpoint between Hugging Face and Megatron format.

``python convert_checkpoints.py import --hf-model ID --megatron-path DIR``
``python convert_checkpoints.py export --hf-model ID --megatron-path DIR --hf-path OUT``
"""

import sys

from megatron.bridge.cli.conversion_tools import convert_checkpoints
from megatron.bridge.cli.errors import exit_code

if __name__ == "__main__":
    sys.exit(exit_code(lambda: convert_checkpoints(sys.argv[1:])))
