#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run uv: the one on PATH, or a private copy under .cache/ that pip downloads once.
# usage: scripts/uv.sh ARGUMENT...
set -euo pipefail
private="$(cd "$(dirname "$0")/.." && pwd)/.cache/uv"

fail() { echo "error: $*" >&2; exit 1; }

# Print the first Python with a working pip; a shim on PATH that cannot run its command is skipped.
python_with_pip() {
    local candidate
    for candidate in $(type -aP python3 python python3.12 2>/dev/null) \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3*/bin/python; do
        if "$candidate" -m pip --version >/dev/null 2>&1; then echo "$candidate"; return; fi
    done
    return 1
}

# --target and not a virtual environment: Debian's Python has no ensurepip to make one with.
fetch() {
    local python
    python=$(python_with_pip) || fail "uv is not on PATH and no Python with pip was found to download it: install uv or python3-pip, then run this again"
    echo "setup: downloading uv with pip (once)" >&2
    "$python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --target "$private" 'uv>=0.8,<1' >&2 ||
        fail "pip could not download uv: check the network or pip's index setting, or install uv yourself, then run this again"
}

# uv does not read pip's settings: pass the index on, so that uv uses a mirror that is configured for pip.
use_pip_index() {
    local index="${PIP_INDEX_URL:-}" python
    if [ -z "$index" ] && python=$(python_with_pip); then
        index=$("$python" -m pip config get global.index-url 2>/dev/null || true)
    fi
    if [ -n "$index" ]; then export UV_DEFAULT_INDEX="$index"; fi
}

if [ -z "${UV_DEFAULT_INDEX:-}" ]; then use_pip_index; fi
if uv --version >/dev/null 2>&1; then exec uv "$@"; fi
if ! "$private/bin/uv" --version >/dev/null 2>&1; then fetch; fi
exec "$private/bin/uv" "$@"
