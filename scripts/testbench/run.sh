#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run the testbench in one profile mode, in the layout of test_env.sh: run.sh MODE [options of python -m scripts.testbench]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/scripts/testbench/test_env.sh"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
mode=$1
shift
ranks=$((TP_SIZE * CP_SIZE > EP_SIZE * ${ETP_SIZE:-1} ? TP_SIZE * CP_SIZE : EP_SIZE * ${ETP_SIZE:-1}))
settings=("model.tensor_model_parallel_size=$TP_SIZE" "model.sequence_parallel=$([ "$TP_SIZE" -gt 1 ] && echo true || echo false)"
    "model.context_parallel_size=$CP_SIZE" "model.expert_model_parallel_size=$EP_SIZE")
[ -z "$ETP_SIZE" ] || settings+=("model.expert_tensor_parallel_size=$ETP_SIZE")
[ "$TP_COMM_OVERLAP" != 1 ] || settings+=("model.tp_comm_overlap=true" "comm_overlap.tp_comm_overlap_cfg=$TP_COMM_OVERLAP_CFG")
options=(--profile-mode "$mode")
[ -z "$TEST_OPS_LIST" ] || options+=(--ops ${TEST_OPS_LIST//,/ })
[ -z "$TEST_CASE_IDXES" ] || options+=(--case-indexes ${TEST_CASE_IDXES//,/ })
exec ${TESTBENCH_WRAPPER:-} torchrun --nproc-per-node "$ranks" --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 \
    -m scripts.testbench "${settings[@]}" "$@" "${options[@]}"
