#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The same through NeMo-Run, which writes the batch script, copies the code, and submits from here or over SSH. It has
# an environment of its own: `make launch-setup`. This prints the script; without --dry-run it is submitted.
#
#   bash tutorials/recipes/llama/05_slurm/with_nemo_run.sh
set -euo pipefail
repository=$(cd "$(dirname "$0")/../../../.." && pwd)
"$repository/.venv-launch/bin/megatron-bridge" launch --dry-run \
    --recipe llama3_70b_pretrain_config --nodes 8 --devices 8 \
    --partition gpu --account A --time 04:00:00 --retries 5 \
    checkpoint.save=runs/llama3-70b checkpoint.save_interval=500 "$@"
