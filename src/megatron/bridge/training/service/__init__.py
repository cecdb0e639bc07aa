# SPDX-License-Identifier: Apache-2.0
"""A training service over HTTP: adapters of several clients over one frozen base."""
