# SPDX-License-Identifier: Apache-2.0
"""For mkdocstrings: ``Example:`` is a section of code like ``Examples:``, and code may follow ``::``."""

import re
from typing import Any

from griffe import Extension, Object


class ExampleSections(Extension):
    """Renames the section while docstrings are read."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Called for each object of the package."""
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
