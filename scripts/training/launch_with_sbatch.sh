#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train with plain Slurm: one task per GPU, without a launcher. From the repository's folder:
#
#   sbatch --nodes=4 --ntasks-per-node=8 --cpus-per-task=12 --gpus-per-node=8 --partition=gpu --account=A \
#       scripts/training/launch_with_sbatch.sh --recipe llama3_8b_pretrain_config checkpoint.save=runs/llama
#
# Slurm sends SIGTERM 120 seconds before the time limit, or when the job is preempted. The run then saves and exits with
# code 75, and the job is requeued until the run has finished. A run that hung (76) is requeued, too. Any other failure
# ends the job.
#
#   PYTHON           Python of the job (default: .venv/bin/python if it exists, else python)
#   CONTAINER_IMAGE  container image to run in (pyxis);  CONTAINER_MOUNTS  its mounts
#   MAX_REQUEUES     how often the job may be requeued (default: 100)

#SBATCH --job-name=megatron-bridge
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@120
set -uo pipefail

if [ -z "${SLURM_SUBMIT_DIR:-}" ] || [ $# -eq 0 ] || [ "$1" = -h ] || [ "$1" = --help ]; then
    sed -n '/^# Train with/,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then exit 0; fi
    echo "error: $([ $# -eq 0 ] && echo "no recipe is given" || echo "this is no Slurm job"): submit it as above" >&2
    exit 2
fi
cd "$SLURM_SUBMIT_DIR" || exit 1
if [ ! -f scripts/training/run_recipe.py ]; then
    echo "error: scripts/training/run_recipe.py is not in $PWD: submit from the repository's folder" >&2
    exit 1
fi
if [ -z "${PYTHON:-}" ]; then
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python; fi
fi

# If one rank exits first, the others must not be killed: they may still be saving.
options=(--kill-on-bad-exit=0 --wait=120)
if [ -n "${CONTAINER_IMAGE:-}" ]; then
    options+=("--container-image=$CONTAINER_IMAGE" "--container-workdir=$PWD")
    options+=("--container-mounts=$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
fi

# Since 22.05 srun does not take over the --cpus-per-task of the job.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then options+=("--cpus-per-task=$SLURM_CPUS_PER_TASK"); fi

# The rank of each task comes from Slurm's own variables (megatron.bridge.utils.torchrun_env).
srun "${options[@]}" "$PYTHON" -u scripts/training/run_recipe.py "$@"
code=$?

if [ "$code" -eq 75 ] || [ "$code" -eq 76 ]; then
    if [ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_REQUEUES:-100}" ]; then
        echo "exit code $code: requeued"
        scontrol requeue "$SLURM_JOB_ID"
        exit 0
    fi
    echo "error: exit code $code, but the job was already requeued ${MAX_REQUEUES:-100} times (MAX_REQUEUES): submit it again" >&2
fi
exit "$code"
