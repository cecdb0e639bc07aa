# SPDX-License-Identifier: Apache-2.0
"""Generate text, chat, and compute log-probabilities with any checkpoint in any parallel layout."""
