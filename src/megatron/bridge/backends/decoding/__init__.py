# SPDX-License-Identifier: Apache-2.0
"""What layers remember between the steps of decoding: keys and values, latents, recurrent states."""
