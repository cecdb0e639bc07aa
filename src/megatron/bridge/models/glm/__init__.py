# SPDX-License-Identifier: Apache-2.0
"""GLM 4 to 5, dense and mixture-of-experts."""
