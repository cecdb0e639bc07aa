# SPDX-License-Identifier: Apache-2.0
"""What an error leaves behind."""

import weakref

from megatron.bridge.checkpoint.collective import forget_frames


class Buffer:
    """Something that a failed write would keep."""


def fail(kept):
    buffer = Buffer()
    kept.append(weakref.ref(buffer))
    raise OSError(28, "No space left on device")


def test_a_failed_write_keeps_no_buffer():
    """CPython 3.12.1 crashes where the collector, not the frame, ends a view of a BytesIO."""
    kept = []
    try:
        try:
            fail(kept)
        except OSError as cause:
            raise RuntimeError("cannot write") from cause
    except RuntimeError as error:
        caught = error
    assert kept[0]() is not None, "the traceback holds it"
    forget_frames(caught)
    assert kept[0]() is None
