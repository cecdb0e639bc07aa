# SPDX-License-Identifier: Apache-2.0
"""What the tests of killed jobs compare with."""

import pytest

from tests.functional_tests.checkpoint.jobs import SAVES, run_job


@pytest.fixture(scope="module")
def undisturbed_jobs(tmp_path_factory):
    """Results of whole jobs, by number of processes."""
    results = {}

    def result(world):
        if world not in results:
            folder = tmp_path_factory.mktemp("undisturbed")
            results[world] = run_job(world, folder / "run", SAVES, folder / "results")
        return results[world]

    return result
