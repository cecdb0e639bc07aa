#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Open a shell in a container with this working tree at /workspace: scripts/start_docker.sh [IMAGE [COMMAND...]]
# Without an image, docker/Dockerfile is built. With another one, such as NVIDIA's for PyTorch, run
# scripts/install_in_docker.sh inside first.
set -euo pipefail
cd "$(dirname "$0")/.."
image=${1:-megatron-bridge}
if [ $# -eq 0 ]; then
    docker build -f docker/Dockerfile -t "$image" .
else
    shift
fi
gpus=()
if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then gpus=(--gpus all); fi
if [ $# -eq 0 ]; then set -- bash; fi
exec docker run --rm -it "${gpus[@]}" --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 \
    -v "$PWD:/workspace" -w /workspace --entrypoint "$1" "$image" "${@:2}"
