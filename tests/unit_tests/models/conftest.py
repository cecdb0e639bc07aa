# SPDX-License-Identifier: Apache-2.0
"""Process groups do not leak from one test into the next."""

import pytest

from tests.workers import forget_model_parallel


@pytest.fixture(autouse=True)
def no_model_parallel_left():
    yield
    forget_model_parallel()
