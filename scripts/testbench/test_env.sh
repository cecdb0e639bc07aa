# SPDX-License-Identifier: Apache-2.0
# The environment of the testbench scripts; a variable that is set already is kept.
export TP_SIZE=${TP_SIZE:-1} CP_SIZE=${CP_SIZE:-1} EP_SIZE=${EP_SIZE:-1} ETP_SIZE=${ETP_SIZE:-}
export TEST_OPS_LIST=${TEST_OPS_LIST:-}           # operators, separated by spaces or commas; empty: all
export TEST_CASE_IDXES=${TEST_CASE_IDXES:-}       # cases of the file; empty: all
export TP_COMM_OVERLAP=${TP_COMM_OVERLAP:-0}      # 1: overlap as TP_COMM_OVERLAP_CFG says, needs Transformer Engine
export TP_COMM_OVERLAP_CFG=${TP_COMM_OVERLAP_CFG:-$root/scripts/testbench/tp_comm_overlap_cfg.yaml}
export UB_SKIPMC=${UB_SKIPMC:-1} NVTE_FLASH_ATTN=${NVTE_FLASH_ATTN:-1} NVTE_FUSED_ATTN=${NVTE_FUSED_ATTN:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
