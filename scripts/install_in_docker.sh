#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install this working tree, editable, into the Python of a container that has PyTorch: scripts/install_in_docker.sh
# Packages that the container has in a version that pyproject.toml allows stay as they are, PyTorch above all.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "error: $*" >&2; exit 1; }
[ -f /.dockerenv ] || [ -n "${IN_CONTAINER:-}" ] ||
    fail "this is no container: use \`make setup\`, or set IN_CONTAINER=1 to install into $(command -v python3)"
python3 -c 'import torch; print("install: keeping PyTorch", torch.__version__)' 2>/dev/null ||
    fail "$(command -v python3) has no PyTorch: use docker/Dockerfile, or an image that has it"
python3 -m pip list --format freeze | grep '^torch==' >/tmp/keep-torch.txt
python3 -m pip install --constraint /tmp/keep-torch.txt --editable .
