# SPDX-License-Identifier: Apache-2.0
"""Configs survive the way to plain data and YAML and back, and what cannot be written is named."""

import contextlib
import dataclasses
import enum
import functools
import math
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer.enums import AttnBackend

from megatron.bridge.peft.lora import LoRA
from megatron.bridge.utils.config.serialize import (
    FORMER_NAMES,
    MARKERS,
    dump_yaml,
    from_plain,
    load_yaml,
    to_plain,
)
from megatron.bridge.utils.errors import UserError


class Color(enum.Enum):
    RED = 1
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1


def double(x):
    return 2 * x


@dataclass
class Inner:
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    names: list[str] = field(default_factory=list)


@dataclass
class Outer:
    __not_config__ = frozenset({"handle"})

    inner: Inner = field(default_factory=Inner)
    value: Any = None
    handle: Any = None
    derived: int = field(init=False, default=0)
    _private: int = 3

    def __post_init__(self):
        self.derived = 7


@dataclass
class Picky:
    size: int = 1

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"size must be positive, not {self.size}")


VALUES = [
    None, True, 0, -3, 10**20, 1e-4, 1e-5, 0.1, math.inf, -math.inf, 1e22, 5e-324,
    "", "yes", "null", "1e-4", "1_000", "1:30", "2020-01-01", "off", "a: b", "line\nline", "007", "0x1f", "é",
    "~", "=", "<<", "- x", " lead", "1.", ".5", "+1", "-.inf", ".nan", "tab\t",
    [], [1, [2.0, "3"]], (), (1, (2, [3])), {}, {"a": {"b": (1,)}}, {1: "x", "1": "y"},
    Path("a/b"), F.silu, F.gelu, F.relu, torch.sigmoid, torch.nn.init.normal_, double, dict, Inner,
    torch.bfloat16, torch.float32, Color.GREEN, Level.LOW, Inner(lr=3.0), [Inner(), Color.RED],
]  # fmt: skip


@pytest.mark.parametrize(
    "value", VALUES, ids=[f"{i}-{type(v).__name__}" for i, v in enumerate(VALUES)]
)
def test_round_trip_is_exact(value):
    back = load_yaml(dump_yaml(Outer(value=value)), trust=True)
    assert back == Outer(value=value)
    assert type(back.value) is type(value)
    assert from_plain(to_plain(value), trust=True) == value


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text().filter(lambda key: key not in MARKERS), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(TREES)
def test_any_plain_value_round_trips(value):
    back = load_yaml(dump_yaml(value), trust=True)
    assert repr(back) == repr(value)


def test_not_a_number_round_trips():
    assert math.isnan(load_yaml(dump_yaml(float("nan"))))


def test_keys_keep_their_order_and_type():
    assert list(load_yaml(dump_yaml({"b": 1, 2: 3, "a": 4}))) == ["b", 2, "a"]


def test_initialiser_with_arguments_round_trips():
    back = load_yaml(
        dump_yaml(functools.partial(torch.nn.init.normal_, mean=0.0, std=0.02)), trust=True
    )
    assert back.func is torch.nn.init.normal_
    assert back.keywords == {"mean": 0.0, "std": 0.02}


def test_derived_private_and_running_fields_are_left_out():
    assert set(to_plain(Outer(handle=object()))) == {"_target_", "inner", "value"}


def test_numbers_read_as_people_write_them():
    read = load_yaml("a: 1e-4\nb: 1E5\nc: 1_000\nd: 0x10\ne: 1:30\nf: 2020-01-01\ng: on\nh: 010")
    assert read == {
        "a": 1e-4,
        "b": 1e5,
        "c": 1000,
        "d": 16,
        "e": "1:30",
        "f": "2020-01-01",
        "g": "on",
        "h": "010",
    }


@pytest.mark.parametrize(
    "value", [lambda x: x, object(), {1, 2}, functools.partial(double, x=1), {"_target_": 1}]
)
def test_what_cannot_be_written_is_named(value):
    with pytest.raises(UserError, match=r"^value cannot be written: it h(olds|as the key)"):
        to_plain(Outer(value=value))


def test_all_problems_of_writing_come_together():
    with pytest.raises(UserError) as error:
        to_plain(Outer(value=[lambda: 0], inner=Inner(names=[object()])))  # pyright: ignore
    assert "value[0] cannot be written" in str(error.value)
    assert "inner.names[0] cannot be written" in str(error.value)


def test_local_class_is_refused():
    @dataclass
    class Local:
        x: int = 0

    with pytest.raises(UserError, match=r"Local has no importable name"):
        to_plain(Local())


def test_attribute_that_is_no_field_is_refused():
    config = Outer()
    config.inner.lrr = 3  # pyright: ignore
    with pytest.raises(UserError, match=r"inner\.lrr is not a field of Inner; did you mean lr\?"):
        to_plain(config)


def test_unknown_keys_are_named_together_with_the_nearest():
    plain = to_plain(Outer())
    plain["inner"]["lrr"] = 1
    plain["valeu"] = 2
    with pytest.raises(UserError) as error:
        from_plain(plain, trust=True)
    assert "inner.lrr is not a field of Inner; did you mean lr?" in str(error.value)
    assert "valeu is not a field of Outer; did you mean value?" in str(error.value)


def test_value_that_the_dataclass_refuses_is_named():
    data = {"model": {"_target_": f"{__name__}.Picky", "size": 0}}
    with pytest.raises(
        UserError, match=r"model: Picky refuses these values: size must be positive, not 0"
    ):
        from_plain(data, trust=True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"_target_": "os.system", "command": "true"}, "os.system is not a dataclass"),
        ({"_target_": "subprocess.Popen", "args": "true"}, "subprocess.Popen is not a dataclass"),
        ({"_target_": "os.system", "_partial_": {"command": "true"}}, "may not be preset"),
        (
            {"_target_": "torch.nn.init.os.system", "_partial_": {"command": "true"}},
            "nothing named 'os'|preset",
        ),
        ({"_target_": "torch.nn.init.torch.load", "_partial_": {"f": "x"}}, "may not be preset"),
        (
            {"_target_": "torch.nn.functional.sliu", "_call_": False},
            "nothing named 'sliu'; did you mean silu",
        ),
        ({"_target_": "no_such_package.x", "_call_": False}, "no module named 'no_such_package'"),
        ({"_target_": "math.pi", "_call_": False}, "is not a function, class"),
        ({"_target_": "math.sin", "_call_": True}, "_target_: math.sin, _call_: false"),
        ({"_target_": "nonsense"}, "nonsense.*public name"),
    ],
)
def test_reading_calls_nothing_but_dataclasses(data, message):
    with pytest.raises(UserError, match=message):
        from_plain({"field": data}, trust=True)
    with pytest.raises(UserError):
        from_plain({"field": data})


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that leaves a file when it is imported."""
    (tmp_path / "of_a_stranger.py").write_text(
        "import dataclasses, pathlib\n"
        "pathlib.Path(__file__).with_name('ran').touch()\n"
        "@dataclasses.dataclass\nclass Config:\n    x: int = 1\n"
        "def function(): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "of_a_stranger"
    sys.modules.pop("of_a_stranger", None)


@pytest.mark.parametrize("name", ["Config", "function", "no_such_thing"])
def test_nothing_is_imported_because_a_file_names_it(tmp_path, module, name):
    text = f"field: {{_target_: {module}.{name}, _call_: false}}"
    with pytest.raises(UserError, match=rf"{module}.{name} is not a public name.*--trust-config"):
        load_yaml(text)
    assert not (tmp_path / "ran").exists()
    with (
        pytest.raises(UserError, match="no_such_thing")
        if name == "no_such_thing"
        else contextlib.nullcontext()
    ):
        load_yaml(text, trust=True)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name",
    [
        "torch.nn.functional.importlib.import_module",
        "torch.nn.functional.warnings",
        "torch.nn.init.torch",
        "torch.load",
        "megatron.bridge.cli.main.main",
        "megatron.core.activations.torch.load",
    ],
)
def test_a_known_module_does_not_lead_elsewhere(name):
    with pytest.raises(UserError, match="is not a public name"):
        load_yaml(f"field: {{_target_: {name}, _call_: false}}")


@pytest.mark.parametrize(
    "value",
    [
        torch.nn.functional.silu,
        torch.sigmoid,
        torch.bfloat16,
        AttnBackend.flash,
        squared_relu,
        quick_gelu,
        functools.partial(torch.nn.init.normal_, std=0.1),
        LoRA(dim=4),
    ],
)
def test_known_names_need_no_trust(value):
    text = dump_yaml({"field": value})
    assert dump_yaml(load_yaml(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", r"run.yaml is not valid YAML at line \d+, column \d+"),
        ("a: 1\nb: 2\na: 3", r"line 3, column 1: the key 'a' is given twice"),
        ("a: !!python/object/apply:os.system ['true']", r"could not determine a constructor"),
        ("\x00", r"run.yaml is not valid YAML"),
    ],
)
def test_broken_yaml_is_one_sentence(text, message):
    with pytest.raises(UserError, match=message):
        load_yaml(text, "run.yaml")


def test_reading_and_writing_need_no_torch():
    code = "import sys, megatron.bridge.utils.config.serialize as s; s.to_plain([1]); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_megatron_configs_round_trip():
    from megatron.core.optimizer import OptimizerConfig

    config = OptimizerConfig(lr=3e-4, bf16=True)
    assert dataclasses.asdict(load_yaml(dump_yaml(config))) == dataclasses.asdict(config)


def test_fields_of_earlier_versions_are_read_under_their_names_of_today():
    from megatron.bridge.training.config import CheckpointConfig

    home = f"{CheckpointConfig.__module__}.CheckpointConfig"
    read = from_plain({"_target_": home, "save": "runs/x", "also_hf": True})
    assert read == CheckpointConfig(save="runs/x", also_save_hf_checkpoint=True)
    with pytest.raises(UserError, match=r"also_hg is not a field of CheckpointConfig"):
        from_plain({"_target_": home, "also_hg": True})
    for (_, former), today in FORMER_NAMES.items():
        assert today in {entry.name for entry in dataclasses.fields(CheckpointConfig)}
        assert former not in {entry.name for entry in dataclasses.fields(CheckpointConfig)}
