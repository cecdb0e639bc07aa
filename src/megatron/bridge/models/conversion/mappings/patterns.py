# SPDX-License-Identifier: Apache-2.0
"""Wildcards in parameter names: ``*`` is one path segment (or the rest of one), ``**`` any number of them."""

import re
from functools import cache

_WILDCARD = re.compile(r"\*\*|\*")


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of ``pattern`` with one group per wildcard.

    Example:
        >>> compiled("layers.*.mlp.weight*").fullmatch("layers.3.mlp.weight12").groups()
        ('3', '12')
    """
    copy_ranges = (re.escape(piece) for piece in _WILDCARD.split(pattern))
    wildcards = (
        "(.+)" if wildcard == "**" else r"([^.]+)" for wildcard in _WILDCARD.findall(pattern)
    )
    return re.compile(
        "".join(text for pair in zip(copy_ranges, [*wildcards, ""], strict=True) for text in pair)
    )


def is_concrete(pattern: str) -> bool:
    return "*" not in pattern


def match(pattern: str, name: str) -> tuple[str, ...] | None:
    """Return the text of each wildcard of ``pattern`` in ``name``, or None if ``name`` does not match."""
    full_match = compiled(pattern).fullmatch(name)
    return full_match.groups() if full_match else None


def substitute(pattern: str, captures: tuple[str, ...]) -> str:
    """Replace the wildcards of ``pattern`` by ``captures`` in order; additional captures are ignored.

    Example:
        >>> substitute("model.layers.*.mlp", ("3",))
        'model.layers.3.mlp'
    """
    values = iter(captures)
    return _WILDCARD.sub(lambda _: next(values), pattern)
