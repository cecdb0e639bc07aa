# SPDX-License-Identifier: Apache-2.0
"""GLM 4 to 4.7, dense and mixture-of-experts."""
