# SPDX-License-Identifier: Apache-2.0
"""Save and load a distributed state at a path: mechanism, no policy."""
