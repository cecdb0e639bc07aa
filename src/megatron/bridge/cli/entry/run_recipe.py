# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge train`` as a script, for launchers that start a file on every rank.

Python puts the folder of a script first on its path, so nothing else may be in this folder: in ``cli``, ``inspect.py``
would replace Python's own module.
"""

import sys

from megatron.bridge.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
