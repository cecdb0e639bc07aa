# SPDX-License-Identifier: Apache-2.0
"""Read and write YAML with rules for configs: ``1e-4`` is a number, a date a string, a duplicate key an error.

PyYAML follows YAML 1.1, where ``1e-4`` is a string, ``1:30`` is ninety, and the second of two equal keys wins.
Reading and writing share one set of rules, so that every scalar keeps its type and value.
"""

import re
from pathlib import Path
from typing import Any, cast

import yaml

from megatron.bridge.utils.errors import UserError

_FLOAT = re.compile(
    r"^[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))$"
    r"|^\.(nan|NaN|NAN)$"
)
_INT = re.compile(r"^[-+]?(0|[1-9][\d_]*)$|^0x[\da-fA-F_]+$")
_BOOL = re.compile(r"^(true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"^(~|null|Null|NULL|)$")

_RULES = (
    ("tag:yaml.org,2002:bool", _BOOL, "tTfF"),
    ("tag:yaml.org,2002:float", _FLOAT, "-+0123456789."),
    ("tag:yaml.org,2002:int", _INT, "-+0123456789"),
    ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
)
_MOST_LEVELS = 100
_MOST_VALUES = 1_000_000
_SINGLE = frozenset({"_call_", "_tuple_", "_path_"})
_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_BaseDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Loader(_BaseLoader):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 - PyYAML reads this class attribute

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                mark = node.value[index][0].start_mark
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} is given twice", problem_mark=mark
                )
        return _BaseLoader.construct_mapping(self, node, deep=deep)


class _Dumper(_BaseDumper):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 - PyYAML reads this class attribute

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_mapping(dumper: Any, data: dict[Any, Any]) -> Any:
    """Write a mapping on separate lines, unless it stands for a single value: a name, a tuple, a path."""
    single = bool(_SINGLE & data.keys())
    return dumper.represent_mapping("tag:yaml.org,2002:map", data, flow_style=single)


_Dumper.add_representer(dict, _represent_mapping)
for _tag, _pattern, _first in _RULES:
    _Loader.add_implicit_resolver(_tag, _pattern, list(_first))
    _Dumper.add_implicit_resolver(_tag, _pattern, list(_first))


def write(plain: Any) -> str:
    """Write plain data as YAML, with the keys in their order."""
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)


def _check_size(text: str, source: str) -> None:
    """Refuse a text that would exhaust the stack or, through nested aliases, the memory."""
    values = 0
    anchors = dict[str, int]()
    open_nodes = list[tuple[str | None, int]]()
    for event in cast(Any, yaml).parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                raise UserError(
                    f"{source}: *{event.anchor} comes before the end of &{event.anchor}"
                )
            values += anchors[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            values += 1
            anchors[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, values))
            values += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            anchors[anchor or ""] = values - before
        if len(open_nodes) > _MOST_LEVELS or values > _MOST_VALUES:
            raise UserError(
                f"{source} has more than {_MOST_LEVELS} levels, or more than {_MOST_VALUES:,} values once its "
                "aliases are expanded: it is not a config"
            )


def tables_beside(module: str) -> dict[str, Any]:
    """Read the tables of constants in the YAML file next to the module with this ``__file__``."""
    path = Path(module).with_suffix(".yaml")
    return read(path.read_text(), path.name)


def read(text: str, source: str = "the YAML text") -> Any:
    """Read plain data from YAML; messages call the text ``source``.

    Example:
        >>> read("lr: 1e-4")
        {'lr': 0.0001}
    """
    try:
        _check_size(text, source)
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{source} is not valid YAML{position}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{source} is not valid YAML: {error}") from error
    except UserError:
        raise
    except UnicodeEncodeError as error:  # bytes of the command line that the locale cannot decode
        raise UserError(f"{source} is not UTF-8: {text!r}") from error
    except ValueError as error:
        raise UserError(f"{source} has a number with thousands of digits") from error
