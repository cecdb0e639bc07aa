#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Format the code and repair what ruff can repair: scripts/format.sh [FILE...]
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
.venv/bin/ruff format "${@:-.}"
.venv/bin/ruff check --fix "${@:-.}"
