# SPDX-License-Identifier: Apache-2.0
"""What is kept out of imports works when it is used; ``project/test_startup.py`` checks what is imported."""

import torch

from megatron.bridge.backends import late_imports


def test_a_function_that_is_excluded_later_is_not_compiled():
    compiling = []

    def double(x):
        compiling.append(torch.compiler.is_compiling())
        return 2 * x

    def increment_doubled(x):
        return excluded(x) + 1

    excluded = late_imports._disable_later(double)
    assert excluded(torch.tensor(3)).item() == 6
    compiled = torch.compile(increment_doubled, backend="eager")
    assert compiled(torch.tensor(3)).item() == 7
    assert compiling == [False, False]
