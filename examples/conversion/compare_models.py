# SPDX-License-Identifier: Apache-2.0
"""Run a model in transformers and in Megatron and compare the logits.

``python compare_models.py --hf-model ID [--megatron-path DIR] [--prompt TEXT]``
"""

import sys

from megatron.bridge.cli.conversion_tools import compare_models
from megatron.bridge.cli.errors import exit_code

if __name__ == "__main__":
    sys.exit(exit_code(lambda: compare_models(sys.argv[1:])))
