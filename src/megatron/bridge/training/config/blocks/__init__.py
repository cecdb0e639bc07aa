# SPDX-License-Identifier: Apache-2.0
"""The blocks of a config: dataclasses whose fields are documented under themselves."""
