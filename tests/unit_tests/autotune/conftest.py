# SPDX-License-Identifier: Apache-2.0
"""Process groups do not leak from one module into the next."""

import pytest

from tests.workers import leave


@pytest.fixture(scope="module", autouse=True)
def no_model_parallel_left():
    yield
    leave()
