# SPDX-License-Identifier: Apache-2.0
"""The exception for mistakes of the user, and the hints in its messages that name the nearest valid name."""

import difflib
from collections.abc import Iterable, Sequence

from megatron.bridge.utils.storage_paths import shown


class UserError(ValueError):
    """A mistake that the user can fix: the message is one sentence with the key, the value and the fix.

    Command lines print only the message and exit with code 1; any other exception is a bug and keeps its traceback.
    Folders that stand for URLs are shown as URLs.
    """

    def __str__(self) -> str:
        return shown(super().__str__())


def refuse(problems: Iterable[str]) -> None:
    """Raise one ``UserError`` with a line for each problem, if there are any."""
    if lines := list(dict.fromkeys(problems)):
        raise UserError("\n".join(lines))


def one_line(error: BaseException, limit: int = 200) -> str:
    """Return the text of ``error`` as one line of at most ``limit`` characters."""
    return " ".join(str(error).split())[:limit]


def first_few(items: Sequence[str], count: int = 3, separator: str = ", ") -> str:
    """Return the first ``count`` of ``items`` as text, and the number of other items.

    Example:
        >>> first_few(["a", "b", "c"], 2)
        'a, b and 1 more'
    """
    more = f" and {len(items) - count} more" if len(items) > count else ""
    return separator.join(items[:count]) + more


def first_problems(problems: Sequence[str]) -> str:
    """Join at most six sentences into one line."""
    return first_few(problems, 6, "; ")


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Return at most ``count`` names from ``candidates``, the closest to ``name`` first.

    Example:
        >>> nearest("train_itres", ["train_iters", "micro_batch_size"])
        ['train_iters']
    """
    distinct = list(dict.fromkeys(candidates))
    return difflib.get_close_matches(name, distinct, n=count, cutoff=0.5)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return a phrase with the nearest candidates, or an empty string if none is near.

    Example:
        >>> did_you_mean("train_itres", ["train_iters", "seed"])
        '; did you mean train_iters?'
    """
    return suggestion(nearest(name, candidates))


def suggestion(names: Sequence[str]) -> str:
    """Return a phrase that proposes ``names``, or an empty string if there are none."""
    return f"; did you mean {' or '.join(names)}?" if names else ""


def nearest_keys(key: str, keys: Iterable[str], count: int = 3) -> list[str]:
    """Return keys close to ``key``: the same name in another group, else similar names in its group, else any.

    Example:
        >>> nearest_keys("model.seed", ["model.sees", "train.seed"])
        ['train.seed']
    """
    keys = list(keys)
    group, _, last = key.rpartition(".")
    namesakes = [name for name in keys if name.rpartition(".")[2] == last]
    if namesakes:
        return difflib.get_close_matches(key, namesakes, count, cutoff=0.0)
    siblings = {name.rpartition(".")[2]: name for name in keys if name.rpartition(".")[0] == group}
    alike = [siblings[name] for name in difflib.get_close_matches(last, siblings, count)]
    return alike or difflib.get_close_matches(key, keys, count, cutoff=0.8)


def misspelling(name: str, candidates: Iterable[str]) -> str:
    """Return a phrase with the likely spelling of ``name``: one letter in eight differs, at most 3.

    Example:
        >>> misspelling("attention_biass", ["attention_bias", "attention_sink"])
        '; did you mean attention_bias?'
    """
    slips = min(3, max(1, len(name) // 8))
    return suggestion(
        difflib.get_close_matches(name, list(candidates), n=2, cutoff=1 - slips / max(len(name), 1))
    )
