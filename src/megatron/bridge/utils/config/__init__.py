# SPDX-License-Identifier: Apache-2.0
"""Config machinery: dataclasses to YAML and back, typed overrides, and where each value came from."""
