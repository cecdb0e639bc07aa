# SPDX-License-Identifier: Apache-2.0
"""What tests ask of the messages for users: the key, the value and the way out, not the wording."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron.bridge.utils.errors import UserError


@contextmanager
def refused(*parts: str) -> Iterator[None]:
    """Expect a ``UserError`` of one line that contains all ``parts``."""
    with pytest.raises(UserError) as caught:
        yield
    assert says(str(caught.value), *parts)


def says(message: str, *parts: str) -> bool:
    """Whether ``message`` is one line that contains all ``parts``; if not, the assertion shows what is missing."""
    assert "\n" not in message
    missing = [part for part in parts if part not in message]
    assert not missing, f"missing in {message!r}: {missing}"
    return True
