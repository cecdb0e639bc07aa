# SPDX-License-Identifier: Apache-2.0
"""The training layer in parts, for programs with loops of their own; docs/rl.md lists the public paths."""
