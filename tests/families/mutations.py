# SPDX-License-Identifier: Apache-2.0
"""Damage to a checkpoint: each must be refused by name, or change the logits; none may pass unseen.

A mutation edits a copy of a row's checkpoint, of which every file is a link to the original until it is written.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.families.harness import Case

INDEX = "model.safetensors.index.json"

# keys that are not tried: names, ids, what other tasks use, how other software runs
WITHOUT_EFFECT = {
    *(
        "_name_or_path",
        "architectures",
        "model_type",
        "transformers_version",
        "dtype",
        "torch_dtype",
    ),
    *("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config"),
    *(
        "is_encoder_decoder",
        "problem_type",
        "id2label",
        "label2id",
        "chunk_size_feed_forward",
        "pretraining_tp",
    ),
    *(
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "use_cache",
    ),
}


@dataclass(frozen=True)
class Mutation:
    """One damage.

    Attributes:
        name: what was done to what.
        apply: does it to a copy.
        blames: what the refusal must mention, one of these.
    """

    name: str
    apply: Callable[["Copy"], None]
    blames: tuple[str, ...]


class Copy:
    """A copy of a checkpoint to damage."""

    def __init__(self, source: Path, directory: Path) -> None:
        shutil.copytree(source, directory, copy_function=os.link)
        self.directory = directory

    @property
    def index(self) -> dict[str, str]:
        """Tensor -> file."""
        return json.loads((self.directory / INDEX).read_text())["weight_map"]

    def change(self, changed: dict[str, dict[str, Tensor]]) -> None:
        """Replace each tensor by others, in its own file."""
        index = self.index
        for name, others in changed.items():
            file = index.pop(name)
            tensors = load_file(self.directory / file)
            del tensors[name]
            tensors |= {other: value.contiguous() for other, value in others.items()}
            self.write(file, tensors)
            index |= dict.fromkeys(others, file)
        self._replace(INDEX, json.dumps({"metadata": {}, "weight_map": index}))

    def write(self, file: str, tensors: dict[str, Tensor]) -> None:
        """Write one shard."""
        (self.directory / file).unlink()
        save_file(tensors, self.directory / file, metadata={"format": "pt"})

    def configure(self, **changes: Any) -> None:
        """Change keys of config.json."""
        config = json.loads((self.directory / "config.json").read_text())
        self._replace("config.json", json.dumps({**config, **changes}))

    def _replace(self, name: str, text: str) -> None:
        (self.directory / name).unlink()
        (self.directory / name).write_text(text)


class Stored:
    """The tensors and the config of a checkpoint, to choose from."""

    def __init__(self, directory: Path) -> None:
        self.index: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
        files = {file: load_file(directory / file) for file in set(self.index.values())}
        self.tensors = {name: files[file][name] for name, file in self.index.items()}
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())

    @property
    def roles(self) -> dict[str, str]:
        """One tensor of each kind: that of the first layer and expert that has one."""
        found: dict[str, str] = {}
        for name in sorted(self.tensors, key=_numbers):
            found.setdefault(re.sub(r"\.\d+\.", ".*.", name), name)
        return found


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\.(\d+)\.", name)]


def mutations(case: Case) -> Iterator[Mutation]:
    """All that is tried on a row."""
    stored = Stored(case.checkpoint)
    for name in stored.roles.values():
        yield from _of_tensor(name, stored.tensors[name])
    yield from _swaps(stored)
    yield from _of_files(stored)
    if (
        "transformer_layer_spec" not in case.row.provider
    ):  # which decides what the config says of layers
        yield from _of_config(stored)


# ---- tensors ----------------------------------------------------------------------------------------------------


def _of_tensor(name: str, tensor: Tensor) -> Iterator[Mutation]:
    """Drop, rename, duplicate and reshape one tensor."""

    def change(what: str, others: dict[str, Tensor], *blames: str) -> Mutation:
        return Mutation(f"{what} {name}", lambda copy: copy.change({name: others}), (name, *blames))

    module, _, kind = name.rpartition(".")
    other = f"{module}x.{kind}"
    yield change("drop", {})
    yield change("rename", {other: tensor}, f"{module}x.")
    yield change("duplicate", {name: tensor, other: tensor.clone()}, f"{module}x.")
    if tensor.dim():  # a number is the same number as a list of one
        yield change("reshape", {name: tensor.reshape(-1) if tensor.dim() > 1 else tensor[None]})
        yield change("shorten", {name: tensor[:-1].clone()})
    if tensor.dim() > 1:
        yield change("transpose", {name: tensor.transpose(-1, -2)})


_PAIRS = (("q_proj", "k_proj"), ("k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_FUSED = (
    "qkv_proj",
    "gate_up_proj",
    "kv_b_proj",
    "kv_a_proj_with_mqa",
    "q_b_proj",
    "gate.weight",
    "router.weight",
)


def _swaps(stored: Stored) -> Iterator[Mutation]:
    """Exchange tensors of equal meaning: refused where shapes differ, else the logits must show it."""
    first = [name for name in stored.tensors if ".layers.0." in name or ".layers.1." in name]
    for one, other in _PAIRS:
        pairs = [
            (name, name.replace(f".{one}.", f".{other}."))
            for name in first
            if f".{one}." in name and name.replace(f".{one}.", f".{other}.") in stored.tensors
        ]
        if pairs:
            yield _exchange(f"swap {one} and {other}", stored, pairs)
    norms = [
        name for name in first if ".layers.0." in name and re.search(r"norm\w*\.weight$", name)
    ]
    for name in norms:
        # the next layer that has one: layers need not be alike
        others = (
            name.replace(".layers.0.", f".layers.{layer}.")
            for layer in range(1, len(stored.tensors))
        )
        if other := next((other for other in others if other in stored.tensors), None):
            yield _exchange(f"swap layers of {name}", stored, [(name, other)])
    for kind in _FUSED:
        found = [name for name in first if re.search(rf"\b{re.escape(kind)}", name)]
        if found:
            rolled = {
                name: {name: stored.tensors[name].roll(len(stored.tensors[name]) // 2, 0)}
                for name in found
            }
            yield Mutation(
                f"roll {kind}", lambda copy, rolled=rolled: copy.change(rolled), tuple(found)
            )


def _exchange(what: str, stored: Stored, pairs: list[tuple[str, str]]) -> Mutation:
    there = [pair for pair in pairs if pair[1] in stored.tensors]
    changed = {one: {one: stored.tensors[other]} for one, other in there}
    changed |= {other: {other: stored.tensors[one]} for one, other in there}
    return Mutation(what, lambda copy: copy.change(changed), tuple(changed))


# ---- files ------------------------------------------------------------------------------------------------------


def _of_files(stored: Stored) -> Iterator[Mutation]:
    shards = sorted(set(stored.index.values()))
    for file in (shards[0], shards[-1]):
        yield Mutation(
            f"remove {file}", lambda copy, file=file: (copy.directory / file).unlink(), (file,)
        )
        yield Mutation(
            f"truncate {file}", lambda copy, file=file: _truncate(copy.directory / file), (file,)
        )
    name, file = next((name, file) for name, file in stored.index.items() if file != shards[0])
    extra = {
        **{n: t for n, t in stored.tensors.items() if stored.index[n] == shards[0]},
        name: stored.tensors[name],
    }
    yield Mutation(f"second {name}", lambda copy: copy.write(shards[0], extra), (name,))
    yield Mutation("ghost in the index", lambda copy: _ghost(copy, file), ("ghost",))


def _truncate(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-10])


def _ghost(copy: Copy, file: str) -> None:
    copy._replace(INDEX, json.dumps({"metadata": {}, "weight_map": {**copy.index, "ghost": file}}))


# ---- config -----------------------------------------------------------------------------------------------------


def _of_config(stored: Stored) -> Iterator[Mutation]:
    def configure(**changes: Any) -> Mutation:
        key = next(iter(changes))
        name = f"{key}={changes[key]!r}"
        # use_sliding_window=False with layers that have one: the message is about sliding_window
        return Mutation(
            name, lambda copy: copy.configure(**changes), (key, *_BLAMES, key.removeprefix("use_"))
        )

    yield configure(attention_biasses=True)
    yield configure(mystery_factor=0.5)
    yield configure(tie_word_embeddings=not stored.config.get("tie_word_embeddings", False))
    for key, value in stored.config.items():
        if key not in WITHOUT_EFFECT and key not in ("rope_parameters", "tie_word_embeddings"):
            yield from (configure(**{key: other}) for other in _others(value))
    for other in _other_ropes(stored.config.get("rope_parameters") or {}):
        yield configure(rope_parameters=other)


# a size that does not fit shows at a tensor; some values are refused before we see them
_BLAMES = ("tensor", "transformers refuses")


def _others(value: Any) -> list[Any]:
    """Other values of the same type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value * 1.5 + 0.25]
    if isinstance(value, str):
        return [f"{value}x"]
    if isinstance(value, list) and len(set(map(str, value))) > 1:
        return [value[::-1] if value[::-1] != value else [value[-1], *value[:-1]]]
    return []


def _other_ropes(rope: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Another base, another rule, another number of the rule, a misspelt one; for each kind of layer."""
    nested = {key: value for key, value in rope.items() if isinstance(value, dict)}
    if nested:
        for key, inner in nested.items():
            yield from ({**rope, key: other} for other in _other_ropes(inner))
        return
    yield {**rope, "rope_theta": 3 * rope.get("rope_theta", 10000.0)}
    yield {"rope_theta": rope.get("rope_theta", 10000.0), "rope_type": "linear", "factor": 3.0}
    yield {**rope, "rope_type": "axial"}
    yield {**rope, "factro": 2.0}
    if "factor" in rope:
        yield {**rope, "factor": 2 * rope["factor"]}
        yield {key: value for key, value in rope.items() if key != "factor"}
        yield {"rope_theta": rope["rope_theta"], "rope_type": "default"}
