# SPDX-License-Identifier: Apache-2.0
"""One test for all families of models: rows of tiny random models, and what each must show."""
