# SPDX-License-Identifier: Apache-2.0
"""Families of other packages: found by entry points, made of the public names, proven by the shipped check."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
import tomllib

import pytest
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.bridge import AutoBridge
from megatron.bridge.cli.main import main
from megatron.bridge.models import GPTModelProvider, MambaModelProvider, families
from megatron.bridge.models.conversion import declare, model_bridge
from megatron.bridge.testing import Row, check_family
from megatron.bridge.utils.errors import UserError
from tests.toy_models import LLAMA
from tests.unit_tests.project.tree import ROOT

PACKAGE = "somebodys_family"
BRIDGE = """
from megatron.bridge.models.families import BIASES, DENSE, LLAMA_LIKE, DecoderBridge, attention, ends, mlp
from megatron.bridge.models.families import register_bridge

@register_bridge("ArceeForCausalLM", model_type="arcee")
class SomebodysBridge(DecoderBridge):
    fields = (*DENSE, *BIASES)
    fixed = {**LLAMA_LIKE, "gated_linear_unit": False}
    weights = (ends(), attention(), mlp(gated=False))
"""
ARCEE = Row(
    "arcee", "ArceeForCausalLM", {**LLAMA, "initializer_range": 0.02}, layouts=("tp2", "pp2")
)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package of one module as pip would: the module and a ``dist-info`` with its entry point."""
    model_bridge.architectures()
    monkeypatch.setattr(model_bridge, "_REGISTRY", dict(model_bridge._REGISTRY))

    def package(source):
        info = tmp_path / f"{PACKAGE}-1.0.dist-info"
        info.mkdir()
        (tmp_path / f"{PACKAGE}.py").write_text(textwrap.dedent(source))
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            f"[{model_bridge.ENTRY_POINTS}]\narcee = {PACKAGE}\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        model_bridge._load_families.cache_clear()

    yield package
    sys.modules.pop(PACKAGE, None)
    model_bridge._load_families.cache_clear()


def save_arcee(folder):
    transformers = pytest.importorskip("transformers")
    config = transformers.ArceeConfig(**ARCEE.config)
    transformers.ArceeForCausalLM(config).save_pretrained(folder)
    return str(folder)


def test_the_command_line_finds_an_installed_family(install, tmp_path, capsys):
    model = save_arcee(tmp_path / "hf")
    model_bridge._REGISTRY.pop("ArceeForCausalLM", None)
    assert main(["plan", "--hf-model", model]) == 1
    assert "ArceeForCausalLM is not supported" in capsys.readouterr().err
    install(BRIDGE)
    assert main(["plan", "--hf-model", model]) == 0
    assert "model.layers.*.mlp.up_proj.weight" in capsys.readouterr().out


def test_docs_adding_a_family_shows_the_entry_point():
    page = (ROOT / "docs" / "adding-a-family.md").read_text()
    (shown,) = re.findall(
        r'^```toml title="pyproject.toml"\n(.*?)^```', page, flags=re.MULTILINE | re.DOTALL
    )
    assert tomllib.loads(shown)["project"]["entry-points"].keys() == {model_bridge.ENTRY_POINTS}


def test_a_package_that_cannot_be_imported_is_named(install):
    install("raise RuntimeError('of an older version')")
    with pytest.raises(
        UserError, match=rf"{PACKAGE} .*RuntimeError: of an older version.*uninstall"
    ):
        AutoBridge.list_supported_models()


def test_the_shipped_check_passes_an_exact_family(install):
    install(BRIDGE)
    check_family(ARCEE, layouts=())


@pytest.mark.slow
def test_the_shipped_check_runs_layouts(install):
    install(BRIDGE)
    check_family(ARCEE)


def test_the_shipped_check_says_what_differs(install):
    install(
        BRIDGE.replace(
            '"gated_linear_unit": False', '"gated_linear_unit": False, "layernorm_epsilon": 0.5'
        )
    )
    model_bridge.architectures()
    found = sys.modules[PACKAGE].SomebodysBridge
    found.fields = tuple(field for field in found.fields if field.hf != "rms_norm_eps")
    found.irrelevant = {"rms_norm_eps": None}
    with pytest.raises(AssertionError, match=r"logits differ by \S+ of their deviation"):
        check_family(ARCEE, layouts=())


def test_a_row_with_dropout_is_told_from_a_wrong_bridge():
    row = dataclasses.replace(
        ARCEE, model="LlamaForCausalLM", config={**LLAMA, "attention_dropout": 0.5}
    )
    with pytest.raises(
        AssertionError, match=r"row arcee has dropout, and numbers are random: set its keys to 0\.0"
    ):
        check_family(row, layouts=())


def test_a_layout_that_is_none_is_refused():
    with pytest.raises(UserError, match=r"layouts=tp3 must be among .*tp2"):
        check_family(ARCEE, layouts=("tp2", "tp3"))


def test_every_public_field_and_block_is_exported():
    modules = [
        found.name for found in pkgutil.iter_modules(declare.__path__) if found.name != "vocabulary"
    ]
    for module in (importlib.import_module(f"{declare.__name__}.{name}") for name in modules):
        for name, value in vars(module).items():
            own = getattr(
                value, "__module__", module.__name__
            ) == module.__name__ and not inspect.ismodule(value)
            if own and not name.startswith("_"):
                assert getattr(families, name, None) is value, (
                    f"{module.__name__}.{name} is not in models/families.py"
                )


# ---- hooks of a provider ----------------------------------------------------------------------------------------


class Marked(TransformerLayer):
    """A layer that the test recognises."""


@dataclasses.dataclass
class EditedProvider(GPTModelProvider):
    finished: bool = False

    def edit_layer_spec(self, spec):
        assert self.is_resolved
        return dataclasses.replace(spec, module=Marked)

    def finish(self, model):
        super().finish(model)
        model.was_finished = self.is_resolved


@dataclasses.dataclass
class EditedHybrid(MambaModelProvider):
    def edit_layer_spec(self, spec):
        return dataclasses.replace(spec, module=Marked) if spec.module is TransformerLayer else spec


SIZES = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "seq_length": 8,
}


def own_spec(config):
    from megatron.bridge.backends.specs.layer_specs import decoder_block_spec

    return decoder_block_spec(config, "torch").layer_specs[0]


@pytest.mark.parametrize(
    "changes", [{}, {"transformer_layer_spec": own_spec}, {"mtp_num_layers": 1}]
)
def test_a_provider_edits_each_layer_and_finishes_the_model(changes):
    (model,) = EditedProvider(**SIZES, **changes).meta_model()
    assert all(type(layer) is Marked for layer in model.decoder.layers)
    assert model.was_finished
    if "mtp_num_layers" in changes:
        assert any(type(module) is Marked for module in model.mtp.modules())


def test_a_hybrid_provider_edits_its_layers():
    (model,) = EditedHybrid(
        **SIZES, hybrid_override_pattern="*-", normalization="RMSNorm"
    ).meta_model()
    assert type(model.decoder.layers[0]) is Marked
