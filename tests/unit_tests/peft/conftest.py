# SPDX-License-Identifier: Apache-2.0
"""Process groups do not leak from one test into the next; models on disk are made once."""

import pytest

from tests.toy_adapters import make
from tests.workers import forget_model_parallel


@pytest.fixture(autouse=True)
def no_model_parallel_left():
    yield
    forget_model_parallel()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Kind -> directory."""
    found = {}

    def directory(kind):
        if kind not in found:
            found[kind] = tmp_path_factory.mktemp(kind)
            make(kind, found[kind])
        return found[kind]

    return directory
