# SPDX-License-Identifier: Apache-2.0
"""What docs/adding-a-family.md shows: a package of one's own, the same family as data, and its row."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion import model_bridge
from tests.families import harness

PAGE = Path(__file__).parents[3] / "docs" / "adding-a-family.md"
PACKAGE = "arcee_bridge.py"
DECLARATION = "src/megatron/bridge/models/arcee/arcee_bridge.py"
ROW = "tests/families/rows/arcee.py"


def shown():
    """The page's blocks with a title."""
    found = re.findall(
        r'^```python title="(.*?)"\n(.*?)^```', PAGE.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    return dict(found)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a block of the page into a package outside this repository and import that."""
    model_bridge.architectures()  # the built-in families register once, and not in the copy
    others = {
        name: found for name, found in model_bridge._REGISTRY.items() if name != "ArceeForCausalLM"
    }
    monkeypatch.setattr(model_bridge, "_REGISTRY", others)

    def package(title):
        folder = tmp_path / "site-packages" / "somebodys_models"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("from somebodys_models import arcee\n")
        (folder / "arcee.py").write_text(shown()[title])
        monkeypatch.syspath_prepend(folder.parent)
        importlib.import_module("somebodys_models")

    yield package
    for name in ("somebodys_models", "somebodys_models.arcee"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """The page's row and its reference."""
    found = {}
    exec(shown()[ROW], found)  # the page's own code
    (row,) = found["ROWS"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(harness.ROWS, row.name, row)
        yield harness.make_reference(row, tmp_path_factory.mktemp(row.name))


@pytest.mark.parametrize("title", [PACKAGE, DECLARATION])
def test_a_separate_package_registers_itself_and_converts(install, case, tmp_path, title):
    assert "ArceeForCausalLM" not in AutoBridge.list_supported_models()
    install(title)
    assert "ArceeForCausalLM" in AutoBridge.list_supported_models()
    problems = harness.numbers_and_bytes(case, "one", tmp_path / "out")
    assert not problems, "\n".join(problems)


def test_its_plan_is_printed_on_the_meta_device(install, case):
    install(PACKAGE)
    bridge = AutoBridge.from_hf_pretrained(case.checkpoint)
    plan = str(bridge.plan(bridge.to_megatron_provider(load_weights=False).meta_model()))
    assert "model.layers.3.mlp.up_proj.weight" in plan
    assert "linear_fc1" in plan


def test_the_page_uses_public_names_only():
    modules = re.findall(
        r"^from megatron\.bridge\.?(\S*) import", shown()[PACKAGE], flags=re.MULTILINE
    )
    assert modules == [
        "models",
        "models.conversion.mapping_registry",
        "models.conversion.model_bridge",
        "models.conversion.param_mapping",
    ]
