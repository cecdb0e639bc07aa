# SPDX-License-Identifier: Apache-2.0
"""What the hardware offers: the CPU device layer and the layer specs."""
