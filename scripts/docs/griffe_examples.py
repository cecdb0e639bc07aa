# SPDX-License-Identifier: Apache-2.0
"""An extension of mkdocstrings: ``Example:`` is a section like ``Examples:``, and code may follow ``::``."""

import re
from typing import Any

from griffe import Extension, Object


class ExampleSections(Extension):
    """Renames the sections when docstrings are read."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
