# SPDX-License-Identifier: Apache-2.0
"""The time of a training step: schedules, kernels, collectives, and a simulator that puts them together."""
