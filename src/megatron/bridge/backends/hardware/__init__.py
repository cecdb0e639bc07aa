# SPDX-License-Identifier: Apache-2.0
"""GPUs: peak FLOP/s, energy counters and user buffers."""
