# SPDX-License-Identifier: Apache-2.0
"""What a run will train on: counts, lengths, packing, the text of samples, and the first batch of each rank."""
