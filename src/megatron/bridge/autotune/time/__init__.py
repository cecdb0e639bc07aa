# SPDX-License-Identifier: Apache-2.0
"""Predict the time of a training step: schedules, kernels, collectives, and a simulator of the pipeline."""
