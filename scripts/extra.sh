#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install optional packages into .cache/NAME for the tests that need them: nvidia-resiliency-ext (resiliency, 15 MB),
# Megatron Energon (energon, 30 MB), W&B, MLflow, Comet and SwanLab (trackers, 195 MB), lm-evaluation-harness (eval),
# FastAPI (serve), OpenTelemetry (otel), datatrove, Ray and s3fs (shards, 290 MB), s3fs and moto's server (storage),
# soundfile and soxr (audio), torchvision (vlm), verl (verl, 215 MB), Tinker's client (tinker, 43 MB), llm-compressor
# (calibrate, 14 MB), Kubeflow's models of manifests (kubernetes) and the Python part of Transformer Engine (te). They are
# not in requirements.lock for the reasons in their lock files, and not in .venv because setup.sh
# would remove them there.
# usage: scripts/extra.sh NAME   (idempotent)
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:-}
lock=scripts/$name.lock
target=.cache/$name
if [ ! -f "$lock" ]; then
    names="audio|calibrate|energon|eval|kubernetes|otel|resiliency|serve|shards|storage|te|tinker|trackers|verl|vlm"
    echo "usage: scripts/extra.sh $names" >&2
    exit 2
fi
wanted=$(sha256sum < "$lock")
if [ -f "$target/.stamp" ] && [ "$(cat "$target/.stamp")" = "$wanted" ]; then exit 0; fi
platform=()
if [ "$name" = resiliency ]; then
    if [ "$(uname -sm)" != "Linux x86_64" ]; then
        echo "resiliency: nvidia-resiliency-ext exists only for Linux on x86_64" >&2
        exit 1
    fi
    # its wheels are tagged for this glibc but work with older ones, where a plain `pip install` refuses them
    platform=(--python-platform x86_64-manylinux_2_39)
fi
rm -rf "$target" "$target.new"
scripts/uv.sh pip install --quiet --target "$target.new" --python .venv/bin/python --no-deps --require-hashes \
    ${platform[@]+"${platform[@]}"} -r "$lock"
echo "$wanted" > "$target.new/.stamp"
mv "$target.new" "$target"
