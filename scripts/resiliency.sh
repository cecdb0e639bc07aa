#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Put nvidia-resiliency-ext into .cache/resiliency, for the tests that need it (3 s, 15 MB).
# Its wheels are tagged for glibc 2.39, but work with older ones: so a plain `pip install` refuses them there, and it
# cannot be part of requirements.lock. Beside .venv and not in it, because setup.sh would remove it from there.
# usage: scripts/resiliency.sh   (idempotent)
set -euo pipefail
cd "$(dirname "$0")/.."
target=.cache/resiliency
wanted=$(sha256sum < scripts/resiliency.lock)
if [ -f "$target/.stamp" ] && [ "$(cat "$target/.stamp")" = "$wanted" ]; then exit 0; fi
if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "resiliency: there is nvidia-resiliency-ext for Linux on x86_64 only" >&2
    exit 1
fi
rm -rf "$target"
scripts/uv.sh pip install --quiet --target "$target.new" --python .venv/bin/python --no-deps --require-hashes \
    --python-platform x86_64-manylinux_2_39 -r scripts/resiliency.lock
echo "$wanted" > "$target.new/.stamp"
mv "$target.new" "$target"
