# SPDX-License-Identifier: Apache-2.0
"""``config.json`` of published models, as they are on the hub: ``<owner>--<model>.json``."""
