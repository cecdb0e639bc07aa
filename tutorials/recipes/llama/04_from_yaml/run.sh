#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A run from a file, without a line of Python. From the repository's folder, behind 00_quickstart_pretrain.py, whose
# corpus it reads:
#
#   bash tutorials/recipes/llama/04_from_yaml/run.sh
set -euo pipefail
repository=$(cd "$(dirname "$0")/../../../.." && pwd)
common=(
    --recipe llama32_1b_pretrain_config
    --config "$repository/tutorials/recipes/llama/04_from_yaml/small.yaml"
    --data runs/tutorials/llama/corpus
    "tokenizer.tokenizer_model=$repository/tutorials/data/tokenizer"
    checkpoint.save=runs/tutorials/llama/yaml
)

# The command line stands above the file, and the file above the recipe. Here: each matrix is cut over two processes.
torchrun --standalone --nproc-per-node=2 "$repository/scripts/training/run_recipe.py" "${common[@]}" \
    model.tensor_model_parallel_size=2

# Longer, and under another layout: layers cut over two processes instead. It goes on from the checkpoint above. A
# schedule of another length changes learning rates of the past, so it has to be asked for.
torchrun --standalone --nproc-per-node=2 "$repository/scripts/training/run_recipe.py" "${common[@]}" \
    model.pipeline_model_parallel_size=2 train.train_iters=60 scheduler.override_opt_param_scheduler=true

# Every setting of the run, and where it came from: the recipe, the file, or the command line.
grep -E 'tensor_model_parallel_size|pipeline_model_parallel_size|train_iters|  lr:' runs/tutorials/llama/yaml/run_config.yaml
