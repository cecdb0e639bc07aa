#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The same through NeMo-Run, which writes the batch script, copies the code, and submits locally or over SSH. It needs its
# own environment: `make launch-setup`. This command prints the script; without --dry-run it submits it.
#
#   bash tutorials/recipes/llama/05_slurm/with_nemo_run.sh
set -euo pipefail
repository=$(cd "$(dirname "$0")/../../../.." && pwd)
"$repository/.venv-launch/bin/megatron-bridge" launch --dry-run \
    --recipe llama3_70b_pretrain_config --nodes 8 --devices 8 \
    --partition gpu --account A --time 04:00:00 --retries 5 \
    checkpoint.save=runs/llama3-70b checkpoint.save_interval=500 "$@"
