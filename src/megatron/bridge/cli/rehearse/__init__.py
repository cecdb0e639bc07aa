# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge train --rehearse``: run a toy-sized version of a job."""
