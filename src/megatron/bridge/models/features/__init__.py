# SPDX-License-Identifier: Apache-2.0
"""Features that Megatron-Core's layers lack, applied by providers."""
