# SPDX-License-Identifier: Apache-2.0
"""Hugging Face -> Megatron -> Hugging Face in one process, every tensor compared bit for bit.

``python hf_megatron_roundtrip.py --model-name ID [--output-dir DIR]``
"""

import sys

from megatron.bridge.cli.conversion_tools import roundtrip
from megatron.bridge.cli.errors import exit_code

if __name__ == "__main__":
    sys.exit(exit_code(lambda: roundtrip(sys.argv[1:])))
