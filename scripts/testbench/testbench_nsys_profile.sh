#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes outputs/nsys_profile/nsight_report.nsys-rep; needs Nsight Systems and a GPU.
mkdir -p outputs/nsys_profile
export TESTBENCH_WRAPPER="nsys profile --force-overwrite true -c cudaProfilerApi --capture-range-end repeat -o outputs/nsys_profile/nsight_report"
command -v nsys > /dev/null || { echo "error: nsys is not installed: install Nsight Systems, or use testbench_torch_profile.sh" >&2; exit 1; }
exec "$(dirname "$0")/run.sh" 1 "$@"
