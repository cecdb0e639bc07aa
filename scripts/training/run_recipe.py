# SPDX-License-Identifier: Apache-2.0
"""Train a model from a recipe: ``megatron-bridge train`` as a script, for torchrun.

torchrun --nproc-per-node=8 scripts/training/run_recipe.py --recipe llama32_1b_pretrain_config train.train_iters=50
"""

import sys

from megatron.bridge.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
