# SPDX-License-Identifier: Apache-2.0
"""The public face of a bridge, beside what the family tests show."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.bridge import AutoBridge
from megatron.bridge.cli.main import main
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.utils.errors import UserError
from tests.toy_models import LLAMA, make_llama, tokens


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf")
    make_llama(directory, num_hidden_layers=2)
    return directory


def test_what_is_supported(hf):
    assert "LlamaForCausalLM" in AutoBridge.list_supported_models()
    assert AutoBridge.can_handle(hf)
    assert AutoBridge.supports(SimpleNamespace(architectures=["LlamaForCausalLM"]))
    assert not AutoBridge.supports(SimpleNamespace(architectures=["NobodysForCausalLM"]))
    assert not AutoBridge.supports(SimpleNamespace())


def test_provider_says_what_the_config_says(hf):
    bridge = AutoBridge.from_hf_pretrained(hf)
    provider = bridge.to_megatron_provider(load_weights=False)
    assert isinstance(provider, GPTModelProvider)
    assert (provider.num_layers, provider.kv_channels, provider.num_query_groups) == (2, 16, 2)
    assert provider.vocab_size == 101
    assert not provider.share_embeddings_and_output_weights
    assert bridge.transformer_config.is_resolved


def test_weights_fill_the_model_without_initialising_it_first(hf):
    provider = AutoBridge.from_hf_pretrained(hf).to_megatron_provider()
    (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False)
    assert chunk.config.perform_initialization is False
    assert (
        provider.perform_initialization is True
    )  # what is declared, and saved, says nothing of it


def test_weights_of_another_directory(hf, tmp_path):
    other = make_llama(tmp_path, num_hidden_layers=2, seed=5)
    bridge = AutoBridge.from_hf_pretrained(hf)
    (chunk,) = bridge.to_megatron_model(hf_path=tmp_path, wrap_with_ddp=False)
    assert torch.equal(chunk.output_layer.weight, other.lm_head.weight)
    (again,) = bridge.to_megatron_model(wrap_with_ddp=False)
    assert not torch.equal(again.output_layer.weight, other.lm_head.weight)


def test_import_and_export_of_checkpoints(hf, tmp_path):
    AutoBridge.import_ckpt(hf, tmp_path / "megatron")
    bridge = AutoBridge.from_hf_pretrained(hf)
    bridge.export_ckpt(tmp_path / "megatron", tmp_path / "out", show_progress=False)
    for path in hf.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    with pytest.raises(
        UserError, match=r"mp_overrides.tensor_model_parallel is not a parallel size; did you mean"
    ):
        bridge.load_megatron_model(tmp_path / "megatron", mp_overrides={"tensor_model_parallel": 2})
    with pytest.raises(UserError, match="absent"):
        bridge.load_megatron_model(tmp_path / "absent")


def test_an_export_rounds_weights_of_a_float32_run_or_keeps_them(tmp_path, capsys):
    source = make_llama(tmp_path / "of_fp32", num_hidden_layers=2)
    source.to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    model = bridge.to_megatron_model(wrap_with_ddp=False, bf16=False, fp16=False)
    trained = model[0].output_layer.weight
    assert trained.dtype == torch.float32
    with torch.no_grad():
        trained.add_(1e-4 * torch.randn_like(trained))
    bridge.save_megatron_model(model, tmp_path / "megatron")
    words = ["--hf-model", str(tmp_path / "hf"), "--megatron-path", str(tmp_path / "megatron")]
    exports = {}
    for dtype in (None, "float32", "bfloat16"):
        out = tmp_path / f"out_{dtype}"
        options = [] if dtype is None else ["--dtype", dtype]
        assert main(["export", *words, "--hf-path", str(out), *options]) == 0
        captured = capsys.readouterr()
        said = " ".join((captured.out + captured.err).split())
        note = "float32 weights are rounded to bfloat16"
        assert (note in said) == (dtype is None)
        assert ("--dtype float32" in said) == (dtype is None)
        exports[dtype] = AutoModelForCausalLM.from_pretrained(out, dtype="auto").lm_head.weight
    assert torch.equal(exports["float32"], trained)
    assert torch.equal(exports[None], trained.bfloat16())
    assert torch.equal(exports["bfloat16"], trained.bfloat16())


def test_a_checkpoint_of_an_uneven_pipeline_loads_in_one_process(hf, tmp_path):
    bridge = AutoBridge.from_hf_pretrained(hf)
    provider = bridge.to_megatron_provider()
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    provider.pipeline_model_parallel_size, provider.num_layers_in_first_pipeline_stage = 2, 1
    bridge.save_megatron_model(model, tmp_path)
    (loaded,) = bridge.load_megatron_model(tmp_path, wrap_with_ddp=False)
    with torch.no_grad():
        assert torch.equal(loaded(*tokens(), None), model[0](*tokens(), None))


def test_the_config_of_a_model_without_a_source_is_that_of_its_weights(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig

    bridge = AutoBridge.from_hf_config(LlamaConfig(**LLAMA, architectures=["LlamaForCausalLM"]))
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.num_layers, provider.bf16 = 2, True
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (loaded.config.num_hidden_layers, loaded.dtype) == (2, torch.bfloat16)
    for name, weight in bridge.export_hf_weights(model, show_progress=False):
        assert torch.equal(weight, loaded.state_dict()[name])


def test_a_model_that_no_config_can_describe_is_not_written_with_one(hf, tmp_path):
    bridge = AutoBridge.from_hf_pretrained(hf)
    provider = bridge.to_megatron_provider()
    provider.window_size, provider.rotary_interleaved = (7, 0), True
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    with pytest.raises(
        UserError, match=r"cannot express rotary_interleaved=True, window_size=\(7, 0\), so"
    ):
        bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert not (tmp_path / "out").exists()
    bridge.save_hf_weights(model, tmp_path / "out", show_progress=False)


def test_weights_alone_can_be_saved(hf, tmp_path):
    bridge = AutoBridge.from_hf_pretrained(hf)
    bridge.save_hf_weights(
        bridge.to_megatron_model(wrap_with_ddp=False), tmp_path / "out", show_progress=False
    )
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".safetensors", ".json"}
    assert not (tmp_path / "out" / "config.json").exists()


def test_the_plan_is_a_table(hf):
    bridge = AutoBridge.from_hf_pretrained(hf)
    (chunk,) = model = bridge.to_megatron_model(wrap_with_ddp=False)
    lines = str(bridge.plan(model)).splitlines()
    assert (
        len(lines)
        == 1 + len(list(chunk.parameters()))
        == 1 + len(bridge.get_conversion_tasks(model))
    )
    assert lines[-1].split() == [
        "output_layer.weight",
        "101x48",
        "column/1",
        "0",
        "AutoMapping",
        "lm_head.weight",
    ]
