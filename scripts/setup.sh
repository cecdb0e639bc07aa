#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Create .venv with exactly the packages of requirements.lock, and install this package in it, editable.
# With an argument, such as `scripts/setup.sh launch`: create .venv-launch from requirements-launch.lock.
# Idempotent: if nothing has changed since the last success, it does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv${1:+-$1}
lock=requirements${1:+-$1}.lock
stamp=$venv/.setup-stamp

fail() { echo "error: $*" >&2; exit 1; }

is_312() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

# Print a Python 3.12, or the bare version for uv to find or download. pyenv's shim is on PATH even if the version that
# it would run is not selected (it exits with 127), so every candidate is tried.
find_python() {
    local candidate
    if [ -n "${PYTHON312:-}" ]; then
        is_312 "$PYTHON312" || fail "PYTHON312=$PYTHON312 is not a working Python 3.12: point it at one or unset it"
        echo "$PYTHON312"
        return
    fi
    for candidate in $(type -aP python3.12 python3 python 2>/dev/null) \
        "${PYENV_ROOT:-$(echo ~)/.pyenv}"/versions/3.12*/bin/python; do
        if is_312 "$candidate"; then echo "$candidate"; return; fi
    done
    echo 3.12
}

make_environment() {
    local python
    python=$(find_python)
    echo "setup: creating $venv with Python $python"
    rm -rf "$venv"
    scripts/uv.sh venv --quiet --python "$python" "$venv" ||
        fail "no Python 3.12 was found or could be downloaded: install one and set PYTHON312 to its path, then run this again"
}

# Show uv's progress only on a terminal; in a log it would be one line for each of 150 packages.
# The largest packages are compiled now: images often set PYTHONDONTWRITEBYTECODE, and each process then compiles what
# it imports, half of the 6 seconds that a command takes to start.
install_packages() {
    local quiet=--quiet
    if [ -t 2 ]; then quiet=; fi
    echo "setup: installing the packages of $lock (about 5 GB on disk the first time)"
    scripts/uv.sh pip sync $quiet --python "$venv/bin/python" --require-hashes "$lock" ||
        fail "the packages of $lock could not be installed: fix the cause in uv's message above, then run this again"
    scripts/uv.sh pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation --editable . ||
        fail "this package could not be installed into $venv: fix the cause in uv's message above, then run this again"
    "$venv/bin/python" -W ignore -m compileall -q -j 0 src "$venv"/lib/python3.12/site-packages/{megatron,numpy,sympy,torch}
}

# What the environment was made from, including the path, which an editable install and the scripts in bin/ contain.
wanted=$({ pwd; cat "$lock" pyproject.toml scripts/setup.sh; } | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && is_312 "$venv/bin/python"; then exit 0; fi

started=$SECONDS
if ! is_312 "$venv/bin/python"; then make_environment; fi
rm -f "$stamp"
install_packages
echo "$wanted" > "$stamp"
echo "setup: ready in $((SECONDS - started)) s (activate it with: . $venv/bin/activate)"
