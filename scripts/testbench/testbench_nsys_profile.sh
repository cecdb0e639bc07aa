#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes outputs/nsys_profile/nsight_report_TIME.nsys-rep, a new file each time; needs Nsight Systems and a GPU.
mkdir -p outputs/nsys_profile
report=outputs/nsys_profile/nsight_report_$(date +%Y%m%d-%H%M%S)
export TESTBENCH_WRAPPER="nsys profile -c cudaProfilerApi --capture-range-end repeat -o $report"
command -v nsys > /dev/null || { echo "error: nsys is not installed: install Nsight Systems, or use testbench_torch_profile.sh" >&2; exit 1; }
exec "$(dirname "$0")/run.sh" 1 "$@"
