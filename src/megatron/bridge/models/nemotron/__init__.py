# SPDX-License-Identifier: Apache-2.0
"""Nemotron and Minitron."""
