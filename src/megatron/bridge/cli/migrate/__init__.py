# SPDX-License-Identifier: Apache-2.0
"""Settings of other frameworks, translated: tables, and what reads them."""
