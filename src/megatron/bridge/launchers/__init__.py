# SPDX-License-Identifier: Apache-2.0
"""Start a training script where it is to run: here, or as jobs of a Slurm cluster."""
