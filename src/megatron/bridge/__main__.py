# SPDX-License-Identifier: Apache-2.0
"""``python -m megatron.bridge``: the command line, also for ``torchrun -m megatron.bridge train``."""

import sys

from megatron.bridge.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
