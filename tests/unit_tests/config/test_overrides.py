# SPDX-License-Identifier: Apache-2.0
"""Overrides are typed by the dataclass, and every mistake is named, with the nearest keys, all together."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf

from megatron.bridge.utils.config.keys import dotted_keys, leaf_values
from megatron.bridge.utils.config.origins import Origins, annotated_yaml
from megatron.bridge.utils.config.overrides import (
    Change,
    Layer,
    apply_layers,
    apply_overrides,
    check_sticks,
    settle_types,
)
from megatron.bridge.utils.config.serialize import load_yaml
from megatron.bridge.utils.errors import UserError
from tests.refusals import refused


class Backend(enum.Enum):
    flash = 1
    unfused = "plain"


@dataclass
class Block:
    overlap: bool = False
    bucket: int | None = None


@dataclass
class Model:
    layers: int = 2
    rate: float = 0.1
    name: str = "tiny"
    path: Path = Path("x")
    dtype: torch.dtype = torch.float32
    late_dtype: torch.dtype = None  # pyright: ignore
    backend: Backend = Backend.flash
    kind: Literal["rope", "none"] = "rope"
    version: Literal[2, 3] | None = None
    pattern: Union[int, list[int], None] = None  # noqa: UP007
    choice: bool | str = False
    pair: tuple[int, float] = (1, 1.0)
    many: tuple[int, ...] = ()
    function: Callable[[int], int] = F.gelu  # pyright: ignore
    optional_function: Optional[Callable] = None  # noqa: UP045
    table: dict[str, Any] | None = None
    counts: dict[str, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    free: Any = None
    block: Block | None = None
    derived: int = field(init=False, default=0)
    _hidden: int = 0

    @property
    def total(self):
        return self.layers


@dataclass
class Stubborn:
    value: int = 1

    def __setattr__(self, name, value):
        object.__setattr__(self, name, min(value, 5))


@dataclass
class Train:
    train_iters: int = 10
    seed: int = 1


@dataclass
class Config:
    model: Any = field(default_factory=Model)
    train: Train = field(default_factory=Train)
    ddp: Block = field(default_factory=Block)
    stubborn: Stubborn = field(default_factory=Stubborn)


GOOD = [
    ("model.layers=4", 4), ("model.layers=1e3", 1000), ("model.rate=1e-4", 1e-4), ("model.rate=3", 3.0),
    ("model.name=007", "007"), ("model.name=true", "true"), ("model.name='a #b'", "a #b"),
    ("model.name=a=b", "a=b"),
    ("model.path=/tmp/x", Path("/tmp/x")),
    ("model.dtype=bf16", torch.bfloat16), ("model.dtype=torch.float16", torch.float16),
    ("model.late_dtype=null", None), ("model.backend=unfused", Backend.unfused),
    ("model.backend=plain", Backend.unfused), ("model.kind=none", "none"), ("model.version=3", 3),
    ("model.version=null", None), ("model.pattern=[1,0,1]", [1, 0, 1]), ("model.pattern=3", 3),
    ("model.choice=true", True), ("model.choice=auto", "auto"), ("model.pair=[2, 3]", (2, 3.0)),
    ("model.many=[1,2,3]", (1, 2, 3)), ("model.function=silu", F.silu),
    ("model.function=torch.nn.functional.relu", F.relu), ("model.optional_function=relu", F.relu),
    ("model.table={a: 1, b: [x, 1e-3]}", {"a": 1, "b": ["x", 1e-3]}), ("model.table=null", None),
    ("model.counts={a: 2}", {"a": 2}), ("model.names=[a,b]", ["a", "b"]),
    ("model.free=[1,{x: y}]", [1, {"x": "y"}]), ("model.block={bucket: 5}", Block(bucket=5)),
    ("ddp.overlap=yes", True), ("ddp.bucket=7", 7), ("train.train_iters=5", 5),
]  # fmt: skip


def value_at(config, key):
    for name in key.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize(("item", "expected"), GOOD)
def test_value_is_typed_by_the_field(item, expected):
    config = Config()
    (change,) = apply_overrides(config, [item])
    found = value_at(config, item.partition("=")[0])
    assert found == expected
    assert type(found) is type(expected)
    assert change.new == expected


@pytest.mark.parametrize(
    "text", ["1", "1e-4", "[1, 2.5, x]", "{a: {b: null}}", "null", "hello", "'1'", "true", "-3"]
)
def test_values_read_as_omegaconf_reads_them(text):
    config = Config()
    apply_overrides(config, [f"model.free={text}"])
    reference = OmegaConf.to_container(OmegaConf.from_dotlist([f"free={text}"]))
    assert config.model.free == reference["free"]  # pyright: ignore


def test_mapping_sets_members_of_a_group_and_keeps_the_others():
    config = Config(ddp=Block(bucket=3))
    apply_overrides(config, ["ddp={overlap: true}", "train={seed: 2}"])
    assert config.ddp == Block(overlap=True, bucket=3)
    assert config.train == Train(seed=2)


def test_mapping_of_the_same_class_keeps_the_other_members_and_of_another_replaces_the_group():
    config = Config(ddp=Block(bucket=3))
    apply_overrides(config, [f"ddp={{_target_: {__name__}.Block, overlap: true}}"])
    assert config.ddp == Block(overlap=True, bucket=3)
    apply_overrides(config, [f"model={{_target_: {__name__}.Block, bucket: 5}}"])
    assert config.model == Block(bucket=5)
    with pytest.raises(UserError, match=r"train must be a Train, not Block"):
        apply_overrides(config, [f"train={{_target_: {__name__}.Block, bucket: 5}}"])


def test_spelled_objects_are_read_at_any_depth():
    config = Config()
    apply_overrides(
        config,
        ["model.free=[{_path_: a}, {x: {_tuple_: [1]}}, {_target_: torch.float16, _call_: false}]"],
    )
    assert config.model.free == [Path("a"), {"x": (1,)}, torch.float16]


def test_member_of_a_mapping_can_be_set():
    config = Config(model=Model(table={"factor": 2.0, "low": 1}))
    apply_overrides(config, ["model.table.factor=8.0"])
    assert config.model.table == {"factor": 8.0, "low": 1}


BAD = [
    (
        "train.train_itres=5",
        "there is no train.train_itres in Train; did you mean train.train_iters?",
    ),
    ("train_iters=5", "there is no train_iters; did you mean train.train_iters"),
    ("model.seed=5", "there is no model.seed in Model; did you mean train.seed?"),
    ("trian.seed=5", "there is no trian.seed; did you mean train.seed?"),
    ("+model.layers=3", "there is no +model.layers; did you mean model.layers"),
    ("model.bogus=1", "there is no model.bogus in Model"),
    ("trian.train_itres=5", "there is no trian.train_itres; did you mean train.train_iters?"),
    ("model.layers=two", "model.layers must be an integer, not 'two'"),
    ("model.layers=1.5", "model.layers must be an integer, not 1.5"),
    ("model.layers=true", "model.layers must be an integer, not True"),
    ("model.layers=null", "model.layers must be an integer, not None"),
    ("model.name=", "model.name must be a string, not None"),
    ("model.rate=fast", "model.rate must be a number, not 'fast'"),
    ("ddp.overlap=1", "ddp.overlap must be true or false, not 1"),
    ("ddp.bucket=x", "ddp.bucket must be an integer or null, not 'x'"),
    ("model.kind=alibi", "model.kind must be one of rope, none, not 'alibi'"),
    ("model.version=9", "model.version must be one of 2, 3 or null, not 9"),
    (
        "model.pattern=x",
        "model.pattern must be an integer or a list, written as [a,b] or null, not 'x'",
    ),
    ("model.pair=[1]", "model.pair must be a list of 2, not [1]"),
    ("model.names=[1,b]", "model.names must be a string, not 1"),
    ("model.dtype=bf17", "model.dtype must be a torch dtype such as bfloat16, not 'bf17'"),
    ("model.backend=fast", "model.backend must be one of flash, unfused, not 'fast'"),
    (
        "model.function=sliu",
        "model.function must be the name of a function, not 'sliu'; did you mean silu",
    ),
    (
        "model.optional_function=sliu",
        "must be the name of a function or null, not 'sliu'; did you mean silu",
    ),
    ("model.function=no.such", "model.function: there is no module named 'no'"),
    ("model.table=x", "model.table must be a mapping"),
    ("model.counts={a: x}", "model.counts must be an integer for 'a', not 'x'"),
    (
        "model.counts={a:4}",
        "model.counts must be an integer for 'a:4', not None: YAML needs a space after a colon, write {a: 4}",
    ),
    (
        "model.block={buckett: 5}",
        "model.block: buckett is not a field of Block; did you mean bucket?",
    ),
    ("model.block={bucket: x}", "model.block: bucket must be an integer or null, not 'x'"),
    ("model.total=3", "model.total is computed from other values and cannot be set"),
    ("model.derived=3", "model.derived is computed from other values and cannot be set"),
    ("model._hidden=3", "model._hidden is computed"),
    ("model.layers.x=3", "model.layers.x cannot be set: model.layers is 2, which has no members"),
    (
        "model.block.buckett=5",
        "there is no model.block.buckett in Block; did you mean model.block.bucket?",
    ),
    (
        "model=x",
        "model: it is a group: set its members, such as model.layers, model.rate, model.name",
    ),
    ("train=3", "train: it is a group: set its members, such as train."),
    ("train.seed", "'train.seed' is not of the form key.sub=value"),
    ("=3", "'=3' is not of the form"),
    ("train.seed=[1", "the value of train.seed is not valid YAML"),
    ("model.name=run #3", "model.name=run #3: YAML reads this as 'run'; put the value in quotes"),
    ("ddp.bucket=#3", "ddp.bucket=#3: YAML reads this as None; put the value in quotes"),
    ("model.layers=4 # few", "model.layers=4 # few: YAML reads this as 4; put the value in quotes"),
    ("model.name=\udcff", "the value of model.name is not UTF-8"),
    ("model.name=&run three", "YAML reads this as 'three'"),
    (
        "stubborn.value=9",
        "stubborn.value=9 from the command line has no effect: another setting changed it to 5",
    ),
]


@pytest.mark.parametrize(("item", "message"), BAD)
def test_mistake_is_named(item, message):
    with pytest.raises(UserError) as error:
        apply_overrides(Config(), [item])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_all_mistakes_come_together_and_nothing_is_set():
    config = Config()
    items = [
        "train.train_iters=7",
        "model.layer=1",
        "model.rate=x",
        "train.seed=1",
        "train.seed=2",
        "oops",
    ]
    with pytest.raises(UserError) as error:
        apply_overrides(config, items)
    assert len(str(error.value).splitlines()) == 4
    assert "train.seed is given twice" in str(error.value)
    assert config == Config()


def test_group_and_member_given_both_is_twice():
    with pytest.raises(UserError, match=r"ddp\.overlap is given twice"):
        apply_overrides(Config(), ["ddp={overlap: true}", "ddp.overlap=false"])


def test_home_is_found_where_the_shell_leaves_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = Config()
    changes = apply_overrides(config, ["model.name=~/runs/a b", "model.path=~/data"])
    assert config.model.name == changes[0].new == f"{tmp_path}/runs/a b"
    assert config.model.path == tmp_path / "data"


def test_values_of_a_file_are_typed_and_named_alike():
    config = Config()
    changes = apply_layers(
        config,
        [Layer("file run.yaml", {"train": {"train_iters": 3}, "model": {"function": "silu"}})],
    )
    assert config.train.train_iters == 3
    assert config.model.function is F.silu
    assert {change.origin for change in changes} == {"file run.yaml"}
    with pytest.raises(
        UserError, match=r"there is no train\.train_itres in Train; did you mean train\.train_iters"
    ):
        apply_layers(config, [Layer("file run.yaml", {"train": {"train_itres": 3}})])


@dataclass
class Parts:
    parts: list[Model] = field(default_factory=list)


def test_a_value_of_a_file_gets_the_type_of_its_field():
    config = load_yaml(
        f"""
_target_: {__name__}.Parts
parts:
- _target_: {__name__}.Model
  function: torch.nn.functional.silu
  rate: 1
  many: [1, 2]
  backend: unfused
  block: {{_target_: {__name__}.Block, bucket: 3}}
""",
        trust=True,
    )
    settle_types(config)
    values = {
        "function": F.silu,
        "many": (1, 2),
        "backend": Backend.unfused,
        "block": Block(bucket=3),
    }
    assert config.parts == [Model(rate=1.0, **values)]
    config.parts[0].layers = "many"
    with refused("parts[0].layers", "integer", "many"):
        settle_types(config)


def test_value_replaced_later_is_found():
    config = Config()
    changes = apply_overrides(config, ["train.seed=5"])
    check_sticks(config, changes)
    config.train.seed = 6
    with pytest.raises(
        UserError,
        match=r"train\.seed=5 from the command line has no effect: another setting changed it to 6",
    ):
        check_sticks(config, changes)


def test_null_asks_for_a_derived_value():
    config = Config()
    change = Change("train.seed", 5, None, "command line")
    check_sticks(config, [change])


def test_a_block_that_was_given_whole_sticks_but_for_what_is_derived():
    config = Config()
    config.model.block = Block(bucket=3)
    change = Change("model.block", None, Block(), "file run.yaml")
    check_sticks(config, [change])
    config.model.block.overlap = True
    with pytest.raises(UserError, match=r"model\.block=.* from the file run\.yaml has no effect"):
        check_sticks(config, [change])


def test_every_dotted_key_of_a_megatron_config_can_be_read_back():
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    keys = list(dotted_keys(config))
    assert "tensor_model_parallel_size" in keys
    apply_overrides(
        config, ["activation_func=silu", "params_dtype=bf16", "window_size=[4,0]", "fp8=null"]
    )
    assert (config.activation_func, config.params_dtype, config.window_size) == (
        F.silu,
        torch.bfloat16,
        (4, 0),
    )


def test_origin_of_each_value_is_kept():
    config = Config(train=Train(seed=9))
    origins = Origins.of(config)
    origins.record(
        config, apply_overrides(config, ["model.table={a: 1}", "ddp={bucket: 4}", "model.block={}"])
    )
    origins.record(config, apply_overrides(config, ["model.table.a=2"], origin="file x.yaml"))
    before = leaf_values(config)
    config.ddp.overlap = True
    origins.record_derived(config, before)
    found = {key: origins.get(key) for key in leaf_values(config)}
    assert found["train.train_iters"] == "default"
    assert found["train.seed"] == "recipe"
    assert found["model.table"] == "file x.yaml"
    assert found["ddp.bucket"] == "command line"
    assert found["ddp.overlap"] == "derived"
    assert found["model.block.bucket"] == found["model.block.overlap"] == "command line"


def test_what_an_option_changed_is_told_from_defaults():
    before = leaf_values(Config())
    config = Config(model=Block(bucket=3), train=Train(seed=2))
    origins = Origins.of(config)
    origins.record_given(config, before, "command line")
    found = {key: origins.get(key) for key in leaf_values(config)}
    assert (found["model.bucket"], found["model.overlap"]) == ("command line", "default")
    assert (found["train.seed"], found["train.train_iters"]) == ("command line", "default")


def test_annotated_yaml_says_the_origin_and_reads_back():
    config = Config(train=Train(seed=9))
    origins = Origins.of(config)
    origins.record(
        config, apply_overrides(config, ["model.table={a: 1, b: {c: x}}", "train.train_iters=3"])
    )
    text = annotated_yaml(config, origins)
    assert "  train_iters: 3  # command line\n" in text
    assert "  seed: 9  # recipe\n" in text
    assert "  # command line:\n  table:\n" in text
    assert load_yaml(text, trust=True) == config


def test_a_member_begins_its_unset_group():
    config = Config()
    origins = Origins.of(config)
    origins.record(config, apply_overrides(config, ["model.block.bucket=5"]))
    assert config.model.block == Block(bucket=5)
    assert origins.get("model.block.bucket") == "command line"
    assert origins.get("model.block.overlap") == "default"


def test_a_group_that_is_begun_for_nothing_stays_unset():
    config = Config()
    with pytest.raises(
        UserError, match=r"model\.block\.bucket must be an integer or null, not 'x'"
    ):
        apply_overrides(config, ["model.block.overlap=true", "model.block.bucket=x"])
    assert config == Config()


def test_one_of_several_classes_is_not_begun():
    from tests.toy_run import toy_config

    with pytest.raises(UserError, match=r"peft is None, which has no members; set peft itself"):
        apply_overrides(toy_config(), ["peft.seed=1"])
