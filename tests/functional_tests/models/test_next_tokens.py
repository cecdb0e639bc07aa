# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction under parallel layouts: its gradients, and the same bytes back."""

import pytest

from tests.families import harness, next_tokens, qwen3_next_tokens


def check(pool, tmp_path, layout, family=next_tokens):
    case = family.make_reference(tmp_path)
    found = pool.run(harness.numbers_and_bytes, case, layout, tmp_path / "out")
    assert not any(found), "\n".join(dict.fromkeys(problem for problems in found for problem in problems))


@pytest.mark.parametrize("layout", ["tp2", "pp2", "vp2", "ep2"])
def test_two_processes(two_workers, tmp_path, layout):
    check(two_workers, tmp_path, layout)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "vp2"])
def test_qwen3_next(two_workers, tmp_path, layout):
    check(two_workers, tmp_path, layout, qwen3_next_tokens)


@pytest.mark.parametrize("layout", ["tp2pp2", "tp2ep2"])
def test_four_processes(four_workers, tmp_path, layout):
    check(four_workers, tmp_path, layout)
