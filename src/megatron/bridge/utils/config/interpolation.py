# SPDX-License-Identifier: Apache-2.0
r"""References in configuration values, in OmegaConf's grammar: ``${train.train_iters}``, ``${oc.env:HOME}``.

OmegaConf parses and resolves them. It is imported only when a value has a reference, because the import takes 0.1 s.
``\${`` stands for a literal ``${``.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

from megatron.bridge.utils.config.names import MARKERS, TARGET
from megatron.bridge.utils.errors import UserError, nearest_keys, refuse, suggestion

_OPENING = re.compile(r"(\\*)\$\{")
_NO_KEY = re.compile(r"Interpolation key '(.+?)' not found")
_NO_VARIABLE = re.compile(r"Environment variable '(.+?)' not found")


def escape(text: str) -> str:
    r"""Escape ``text``, so that it has no reference.

    Example:
        >>> print(escape("costs ${x}"))
        costs \${x}
    """
    return _OPENING.sub(r"\1\1\\${", text)


def unescape(text: str) -> str:
    """Undo ``escape``; references stay unchanged."""

    def plain(match: "re.Match[str]") -> str:
        return match[0] if _is_reference(match) else match[1][: len(match[1]) // 2] + "${"

    return _OPENING.sub(plain, text)


def has_reference(value: object) -> bool:
    """Return whether ``value``, or an item in it, is a string with a reference."""
    if isinstance(value, str):
        return any(map(_is_reference, _OPENING.finditer(value)))
    if isinstance(value, dict):
        return any(map(has_reference, cast("dict[Any, Any]", value).values()))
    return isinstance(value, (list, tuple)) and any(map(has_reference, cast("list[Any]", value)))


def _is_reference(match: "re.Match[str]") -> bool:
    return len(match[1]) % 2 == 0


def references_in(values: object, key: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings and lists with a reference, by dotted key.

    Example:
        >>> references_in({"a": {"b": "${c}", "d": [1, "x/${c}"]}})
        {'a.b': '${c}', 'a.d.1': 'x/${c}'}
    """
    if not has_reference(values):
        return {}
    if isinstance(values, str) or (isinstance(values, dict) and MARKERS - {TARGET} & values.keys()):
        return {key: values}
    items = cast(
        "dict[Any, Any]",
        values if isinstance(values, dict) else dict(enumerate(cast("list[Any]", values))),
    )
    parts = (
        references_in(value, f"{key}.{name}" if key else str(name)) for name, value in items.items()
    )
    return {name: value for part in parts for name, value in part.items()}


def resolve_tree(values: dict[str, Any]) -> dict[str, Any]:
    """Resolve references between values of nested mappings; an error lists every unresolved reference."""
    raw = references_in(values)
    if not raw:
        return values
    resolve(raw, values)  # reports all errors together

    from omegaconf import OmegaConf

    return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.create(values), resolve=True))


def resolve(raw: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the references in ``raw`` by dotted key; they refer to values in ``tree``."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    resolved: dict[str, Any] = {}
    problems: list[str] = []
    try:  # OmegaConf reports syntax errors here, one at a time
        root = OmegaConf.create(dict(tree), flags={"allow_objects": True})
        for key, value in raw.items():
            OmegaConf.update(root, key, value, merge=False, force_add=True)
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        raise UserError(_error_sentence(key, raw.get(key), error, tree)) from None
    for key, value in raw.items():
        try:
            selected: Any = OmegaConf.select(root, key)
            resolved[key] = (
                OmegaConf.to_container(selected, resolve=True)
                if OmegaConf.is_config(selected)
                else selected
            )
        except OmegaConfBaseException as error:
            problems.append(_error_sentence(key, value, error, tree))
    refuse(problems)
    return resolved


def _error_sentence(key: str, value: Any, error: Exception, tree: Mapping[str, Any]) -> str:
    reason = str(error).partition("\n")[0]
    if match := _NO_KEY.search(reason):
        return f"{key}={value}: there is no {match[1]}{suggestion(nearest_keys(match[1], _dotted_keys(tree)))}"
    if match := _NO_VARIABLE.search(reason):
        name = match[1]
        return (
            f"{key}={value}: the environment variable {name} is not set; set it, or give a default: "
            f"${{oc.env:{name},default}}"
        )
    return f"{key}={value} cannot be resolved: {reason}; write the value itself, or \\${{ for a literal ${{"


def _dotted_keys(tree: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _dotted_keys(cast("dict[str, Any]", value), f"{prefix}{name}.")
