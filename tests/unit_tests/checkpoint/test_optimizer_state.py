# SPDX-License-Identifier: Apache-2.0
"""An interval of a flattened tensor is the union of its boxes, in order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron.bridge.training.optim.optimizer_state import tensor_slices


@st.composite
def _intervals(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    start, end = sorted(
        (draw(st.integers(0, np.prod(shape))), draw(st.integers(0, np.prod(shape))))
    )
    return shape, int(start), int(end)


@given(_intervals())
def test_boxes_fill_the_interval_in_order(interval):
    shape, start, end = interval
    numbers = np.arange(np.prod(shape)).reshape(shape)
    found = tensor_slices(shape, start, end)
    assert len(found) <= 2 * len(shape) - 1
    covered = []
    for box in found:
        part = numbers[
            tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))
        ].ravel()
        assert part[0] == start + box.flat
        covered += part.tolist()
    assert covered == list(range(start, end))
