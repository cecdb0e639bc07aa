# SPDX-License-Identifier: Apache-2.0
"""Two packages of the same name are told apart before their modules are mixed."""

import pytest

from megatron.bridge.utils import clash


@pytest.fixture
def roots(tmp_path):
    (tmp_path / "a" / "megatron" / "bridge" / "utils").mkdir(parents=True)
    (tmp_path / "b" / "megatron").mkdir(parents=True)
    (tmp_path / "a" / "megatron" / "bridge" / "__init__.py").touch()
    (tmp_path / "a" / "megatron" / "bridge" / "utils" / "clash.py").touch()
    return [str(tmp_path / name / "megatron") for name in ("a", "b")]


def test_one_package_is_fine(roots):
    clash.refuse_others(roots)


def test_another_package_on_the_path(roots, tmp_path):
    (tmp_path / "b" / "megatron" / "bridge").mkdir()
    (tmp_path / "b" / "megatron" / "bridge" / "__init__.py").touch()
    with pytest.raises(
        ImportError, match=r"b/megatron/bridge is not hf-megatron-bridge.*separate environment"
    ):
        clash.refuse_others(roots)


@pytest.mark.parametrize(
    ("module", "clashes"), [("megatron/bridge/__init__.py", True), ("megatron/core.py", False)]
)
def test_a_megatron_core_that_brings_one(roots, tmp_path, module, clashes):
    info = tmp_path / "a" / "megatron_core-0.30.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text(f"{module},sha256=0,10\n")
    if not clashes:
        clash.refuse_others(roots)
        return
    with pytest.raises(ImportError, match=r"megatron_core-0\.30\.0.*separate environment"):
        clash.refuse_others(roots)
