#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A run from a YAML file, without Python code. Start it from the repository's folder, after 00_quickstart_pretrain.py,
# whose corpus it reads:
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

# The command line overrides the file, and the file overrides the recipe. Here, two processes share each matrix.
torchrun --standalone --nproc-per-node=2 "$repository/scripts/training/run_recipe.py" "${common[@]}" \
    model.tensor_model_parallel_size=2

# Continue from the checkpoint above for more steps, under another layout: two processes share the layers. A longer run
# changes the learning-rate schedule, which must be requested explicitly.
torchrun --standalone --nproc-per-node=2 "$repository/scripts/training/run_recipe.py" "${common[@]}" \
    model.pipeline_model_parallel_size=2 train.train_iters=60 scheduler.override_opt_param_scheduler=true

# The saved config contains every setting with its origin: the recipe, the file, or the command line.
grep -E 'tensor_model_parallel_size|pipeline_model_parallel_size|train_iters|  lr:' runs/tutorials/llama/yaml/run_config.yaml
