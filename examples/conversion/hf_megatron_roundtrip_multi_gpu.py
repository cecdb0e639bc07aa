# SPDX-License-Identifier: Apache-2.0
"""Hugging Face -> Megatron -> Hugging Face over several processes, with or without GPUs.

``torchrun --nproc-per-node 4 hf_megatron_roundtrip_multi_gpu.py --model-name ID --tp 2 --pp 2``
"""

import sys

from megatron.bridge.cli.conversion_tools import roundtrip
from megatron.bridge.cli.errors import exit_code

if __name__ == "__main__":
    sys.exit(exit_code(lambda: roundtrip(sys.argv[1:])))
