# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.workers import forget_model_parallel


@pytest.fixture(autouse=True)
def one_process():
    """Each test starts and ends without the process groups of another one."""
    forget_model_parallel()
    yield
    forget_model_parallel()
