# SPDX-License-Identifier: Apache-2.0
"""Generation, chat and log-probabilities with any checkpoint, under any layout."""
