# SPDX-License-Identifier: Apache-2.0
"""Start a recipe on this machine or on a Slurm cluster: ``megatron-bridge launch`` as a script.

python scripts/training/launch_with_nemo_run.py --local --recipe llama32_1b_pretrain_config --devices 2 \
    train.train_iters=10
"""

import sys

from megatron.bridge.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
