# SPDX-License-Identifier: Apache-2.0
"""References follow OmegaConf's grammar, see the values of all layers, and every mistake in them is named."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from megatron.bridge.utils.config.interpolation import escape, has_reference, unescape
from megatron.bridge.utils.config.names import importing
from megatron.bridge.utils.config.origins import Origins
from megatron.bridge.utils.config.overrides import Layer, apply_layers, apply_overrides
from megatron.bridge.utils.config.serialize import dump_yaml, load_yaml
from megatron.bridge.utils.errors import UserError


@dataclass
class Train:
    iters: int = 10
    samples: int | None = None
    rate: float = 0.5
    name: str = "tiny"
    dtype: torch.dtype = torch.float32
    path: Path = Path("data")


@dataclass
class Adapter:
    dim: int
    alpha: float = 1.0


@dataclass
class Config:
    train: Train = field(default_factory=Train)
    decay: int = 0
    label: str = ""
    dtype: torch.dtype = torch.bfloat16
    path: Path | None = None
    blend: tuple[list[str], list[float] | None] | None = None
    counts: list[int] = field(default_factory=lambda: [1, 2])
    table: dict[str, Any] = field(default_factory=dict)
    t: dict[str, Any] = field(default_factory=dict)
    adapter: Any = None


GOOD = [
    ("decay=${train.iters}", 10),
    ("decay='${train.iters}'", 10),
    ("decay=${counts[1]}", 2),
    ("decay=${counts.0}", 1),
    ("decay=${oc.env:STEPS}", 7),
    ("decay=${oc.env:NOT_SET,3}", 3),
    ("decay=${oc.select:train.none,4}", 4),
    ("decay=${train.${oc.env:WHICH}}", 10),
    ("label=run-${train.iters}-${train.name}", "run-10-tiny"),
    ("label=${train.iters}", "10"),
    ("label=${oc.env:TEXT}", "007"),
    (r"label=\${train.iters}", "${train.iters}"),
    ("label=$HOME", "$HOME"),
    ("dtype=${train.dtype}", torch.float32),
    ("path=${train.path}/x", Path("data/x")),
    ("counts=['${train.iters}', 3]", [10, 3]),
    ("blend=[['${train.path}/a', b], [0.5, '${train.rate}']]", (["data/a", "b"], [0.5, 0.5])),
    ("table={a: {b: '${train.iters}'}, c: ['${decay}']}", {"a": {"b": 10}, "c": [0]}),
    ("train={samples: '${train.iters}'}", Train(samples=10)),
]


@pytest.mark.parametrize(("item", "expected"), GOOD)
def test_reference_is_resolved_and_typed(item, expected, monkeypatch):
    monkeypatch.setenv("STEPS", "7")
    monkeypatch.setenv("TEXT", "007")
    monkeypatch.setenv("WHICH", "iters")
    config = Config()
    apply_overrides(config, [item])
    assert getattr(config, item.partition("=")[0]) == expected


TEXTS = [
    "${t.a}",
    "x${t.a}y${t.b.c}",
    r"\${t.a}",
    r"\\${t.a}",
    r"x\y \${t.a} ${t.a}",
    "${oc.env:HOME}",
    "${t.b}",
    "${.a}",
]


@pytest.mark.parametrize("text", TEXTS)
def test_values_are_those_of_omegaconf(text):
    tree = {"t": {"a": 1, "b": {"c": "z"}, "text": text}}
    reference: Any = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    config = Config()
    apply_layers(config, [Layer("file", tree)])
    assert config.t == reference["t"]


def test_references_see_the_values_of_later_layers():
    config = Config()
    file = Layer(
        "file x.yaml",
        {"train": {"iters": 20}, "decay": "${train.iters}", "label": "${decay} steps"},
    )
    changes = apply_layers(config, [file, Layer("command line", overrides=["train.iters=30"])])
    assert (config.train.iters, config.decay, config.label) == (30, 30, "30 steps")
    origins = Origins.of(config)
    origins.record(config, changes)
    assert (origins.get("decay"), origins.get("train.iters")) == ("file x.yaml", "command line")


def test_a_later_layer_overrides_a_reference():
    config = Config()
    apply_layers(
        config,
        [Layer("file", {"decay": "${train.iters}"}), Layer("command line", overrides=["decay=4"])],
    )
    assert config.decay == 4


def test_a_later_layer_replaces_one_item_of_what_a_reference_is_in():
    config = Config()
    file = {"counts": ["${train.iters}", 5], "table": {"a": "${train.iters}", "b": 1}}
    file["adapter"] = {
        "_target_": f"{__name__}.Adapter",
        "dim": "${train.iters}",
        "alpha": "${adapter.dim}",
    }
    overrides = ["counts[1]=6", "table.b=2", "adapter.dim=8", "train.iters=11"]
    with importing():
        apply_layers(config, [Layer("file", file), Layer("command line", overrides=overrides)])
    assert (config.counts, config.table, config.adapter) == (
        [11, 6],
        {"a": 11, "b": 2},
        Adapter(8, 8.0),
    )


def test_items_of_lists_are_set_by_index():
    recipe = Config(blend=(["a", "b"], None))
    shared = recipe.counts
    changes = apply_overrides(recipe, ["counts[0]=5", "blend[0][1]=c", "blend.1=[1, 2]"])
    assert (recipe.counts, recipe.blend) == ([5, 2], (["a", "c"], [1.0, 2.0]))
    assert shared == [1, 2], "the list of the recipe stays as it is"
    assert [change.key for change in changes] == ["counts.0", "blend.0.1", "blend.1"]


BAD = [
    (
        "decay=${train.itres}",
        "decay=${train.itres}: there is no train.itres; did you mean train.iters?",
    ),
    ("decay=${train.samples}", "decay must be an integer, not None"),
    ("decay=x${train.iters}", "decay must be an integer, not 'x10'"),
    (
        "label=${oc.env:NOT_SET}/x",
        "label=${oc.env:NOT_SET}/x: the environment variable NOT_SET is not set; set it, or",
    ),
    (
        "label=${now:%Y}",
        "label=${now:%Y} cannot be resolved: Unsupported interpolation type now; write the value",
    ),
    ("label=${", "label=${ cannot be resolved:"),
    ("label=${label}", "label=${label} cannot be resolved: Recursive interpolation"),
    ("counts=[${decay}]", "counts is not valid YAML at line 1"),
    ("counts=[${decay}]", "; quote ${...} inside lists and mappings"),
    ("tran.iters=${decay}", "there is no tran.iters; did you mean train.iters?"),
    ("counts[2]=5", "there is no counts.2: counts has 2 items, counted from 0; set counts itself"),
    ("counts[0]=x", "counts.0 must be an integer, not 'x'"),
    ("blend[0]=x", "cannot be set: blend is None, which has no members; set blend itself"),
    ("label=???", "label: ??? marks a required value; set it"),
]


@pytest.mark.parametrize(("item", "message"), BAD)
def test_mistake_is_named_and_nothing_is_set(item, message):
    config = Config()
    with pytest.raises(UserError) as error:
        apply_overrides(
            config,
            ["train.rate=2", "counts[1]=9", "table.new=1", "train.name=${oc.env:HOME}", item],
        )
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert config == Config()


def test_all_mistakes_come_together():
    with pytest.raises(UserError) as error:
        apply_overrides(Config(), ["decay=x", "label=${a.b}", "train.name=${oc.env:NOT_SET}"])
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize("text", ["${a}", r"\${a}", r"\\${a}", "$", "${", r"a\b${c} ${d}", "$${a}"])
def test_literal_text_round_trips(text):
    assert not has_reference(escape(text))
    assert unescape(escape(text)) == text
    for value in (text, [text], {"a": text}, Path(text)):
        assert load_yaml(dump_yaml(value), trust=True) == value


def test_references_of_a_whole_file_are_resolved():
    text = dump_yaml(Config(adapter=Adapter(4))).replace("decay: 0", "decay: ${train.iters}")
    assert load_yaml(text.replace("dim: 4", "dim: ${decay}"), trust=True) == Config(
        decay=10, adapter=Adapter(10)
    )
    with pytest.raises(UserError, match=r"decay=\$\{train.itres\}: there is no train\.itres"):
        load_yaml(text.replace("{train.iters}", "{train.itres}"))


def test_omegaconf_is_imported_only_for_references():
    code = (
        "import sys; from dataclasses import make_dataclass\n"
        "from megatron.bridge.utils.config.overrides import apply_overrides\n"
        "config = make_dataclass('C', [('a', int, 1), ('b', int, 2)])()\n"
        "apply_overrides(config, ['a=3']); before = 'omegaconf' in sys.modules\n"
        "apply_overrides(config, ['b=${a}']); print(before, config.b)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == [
        "False",
        "3",
    ]
