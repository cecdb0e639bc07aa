# SPDX-License-Identifier: Apache-2.0
"""Keywords of trainers that have loops of their own: each does what it says, or its value is refused by name."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.engine.export import SaveOptions
from megatron.bridge.models.conversion.peft_bridge import build_adapter_config_dict
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.utils import create_peft
from megatron.bridge.training.config import DistributedDataParallelConfig as RunDDPConfig
from megatron.bridge.training.utils.config_utils import create_ddp_config
from megatron.bridge.utils.errors import UserError
from tests.toy_models import make_llama


@pytest.fixture(scope="module")
def bridge(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf")
    make_llama(directory, num_hidden_layers=1)
    return AutoBridge.from_hf_pretrained(directory)


def provider_of(bridge):
    return bridge.to_megatron_provider(load_weights=False)


def test_overrides_set_the_dtype_and_attributes(bridge):
    provider = provider_of(bridge)
    found = provider.apply_overrides_and_finalize(
        dtype=torch.bfloat16, overrides={"seq_length": 24}
    )
    assert found is provider
    assert (provider.bf16, provider.fp16, provider.seq_length) == (True, False, 24)
    assert provider.params_dtype == torch.bfloat16


def test_an_unknown_override_changes_nothing(bridge):
    provider = provider_of(bridge)
    with pytest.raises(UserError, match=r"no attribute seq_lenght.*seq_length"):
        provider.apply_overrides_and_finalize(dtype=torch.bfloat16, overrides={"seq_lenght": 24})
    assert not provider.bf16


def test_refused_values_change_nothing(bridge):
    provider = provider_of(bridge)
    with pytest.raises(UserError, match="refuses"):
        provider.apply_overrides_and_finalize(
            overrides={"seq_length": 24, "fp16": True, "bf16": True}
        )
    assert provider.seq_length != 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_model_with_meta_device": True}, "init_model_with_meta_device=True .*meta_model"),
        ({"model_type": "retro"}, r"model_type=retro .*encoder_or_decoder"),
        (
            {"use_megatron_fsdp": False, "ddp_config": RunDDPConfig(use_megatron_fsdp=True)},
            "use_megatron_fsdp=False .*set both",
        ),
    ],
)
def test_values_that_cannot_be(bridge, options, message):
    with pytest.raises(UserError, match=message):
        provider_of(bridge).provide_distributed_model(**options)


def test_ddp_config_for_an_external_loop():
    assert create_ddp_config(wrap_with_ddp=False) is None
    config = create_ddp_config(overrides={"grad_reduce_in_fp32": True})
    assert isinstance(config, DistributedDataParallelConfig)
    assert (config.grad_reduce_in_fp32, config.use_distributed_optimizer) == (True, True)
    assert config.data_parallel_sharding_strategy == "no_shard"
    sharded = create_ddp_config(use_megatron_fsdp=True)
    assert sharded.use_megatron_fsdp
    assert sharded.data_parallel_sharding_strategy == "optim_grads_params"
    with pytest.raises(TypeError, match="overlap_gard"):
        create_ddp_config(overrides={"overlap_gard": True})


def test_weights_in_another_dtype(bridge, tmp_path):
    from transformers import AutoModelForCausalLM

    model = bridge.to_megatron_model(wrap_with_ddp=False)
    exported = list(
        bridge.export_hf_weights(model[0], show_progress=False, weight_dtype="bfloat16")
    )
    assert {item.weight.dtype for item in exported} == {torch.bfloat16}
    bridge.save_hf_pretrained(
        model[0], tmp_path / "out", show_progress=False, weight_dtype=torch.bfloat16
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    state = loaded.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in exported)


def test_who_writes(tmp_path):
    assert SaveOptions.of_keywords(True, None, None, 1, tmp_path).writers is None
    assert SaveOptions.of_keywords(True, None, False, 1, tmp_path).writers == (0,)
    assert SaveOptions.of_keywords(True, None, True, 2, tmp_path).writers == (0,)
    for every, distributed_save in ((0, True), (2, None)):
        with pytest.raises(UserError, match=f"save_every_n_ranks={every} .*distributed_save=True"):
            SaveOptions.of_keywords(True, None, distributed_save, every, tmp_path)


def test_tasks_under_either_keyword(bridge):
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    assert len(bridge.get_conversion_tasks(megatron_model=model)) == len(
        bridge.get_conversion_tasks(model[0])
    )
    with pytest.raises(UserError, match="model or megatron_model"):
        bridge.get_conversion_tasks()
    with pytest.raises(UserError, match=r"skip_temp_dist_context=False .*destroy_process_group"):
        bridge.load_megatron_model("nowhere", skip_temp_dist_context=False)


def test_side_files_alone(bridge, tmp_path):
    assert bridge.hf_pretrained.name_or_path == bridge.hf_pretrained.model_name_or_path
    (tmp_path / "config.json").write_text("{}")
    bridge.hf_pretrained.save_artifacts(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert not any(name.endswith(".safetensors") for name in names)
    assert "hidden_size" in (tmp_path / "config.json").read_text()


def test_settings_of_adapters():
    assert create_peft({"rank": 0}) is None
    found = create_peft(
        {"type": "dora", "rank": 4, "alpha": 8, "merge": True, "exclude_modules": []}
    )
    assert found == DoRA(dim=4, alpha=8)
    with pytest.raises(UserError, match=r"lora\.ranks=4: LoRA has no such setting"):
        create_peft({"rank": 4, "ranks": 4})
    with pytest.raises(UserError, match=r"lora\.type=ia3: use one of lora"):
        create_peft({"type": "ia3", "rank": 4})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_dtype": "bfloat16"}, r"lora_dtype=bfloat16: .* float32; leave it out"),
        ({"a2a_experimental": True}, "a2a_experimental=True .*remove it"),
        ({"lora_A_init_method": "zero"}, "both zero"),
    ],
)
def test_adapters_that_cannot_be(bridge, settings, message):
    model = provider_of(bridge).provide_distributed_model(wrap_with_ddp=False)
    with pytest.raises(UserError, match=message):
        LoRA(dim=4, **settings)(model)


def test_a_frozen_adapter_may_be_zero(bridge):
    model = provider_of(bridge).provide_distributed_model(wrap_with_ddp=False)
    LoRA(dim=4, lora_A_init_method="zero", lora_B_init_method="zero")(model, training=False)


def test_the_base_is_not_there_when_modules_were_trained(bridge):
    peft = LoRA(dim=4, modules_to_save=["output_layer"])
    model = provider_of(bridge).provide_distributed_model(wrap_with_ddp=False)
    peft(model)
    with (
        pytest.raises(UserError, match=r"modules_to_save=\['output_layer'\].*second model"),
        peft.disable_adapter(model),
    ):
        pass


def test_adapter_config():
    found = build_adapter_config_dict(
        LoRA(dim=4, alpha=8), ["q_proj"], base_model_name_or_path="owner/base"
    )
    assert (found["r"], found["lora_alpha"], found["use_dora"]) == (4, 8, False)
    assert found["base_model_name_or_path"] == "owner/base"


@pytest.mark.parametrize(
    "name",
    [
        "deepseek.deepseek_v3_bridge.DeepSeekV3Bridge",
        "gpt_oss.gpt_oss_bridge.GPTOSSBridge",
        "model_provider.ModelProviderMixin",
    ],
)
def test_names_that_classes_have_elsewhere(name):
    import importlib

    module, _, member = name.rpartition(".")
    assert hasattr(importlib.import_module(f"megatron.bridge.models.{module}"), member)


def test_an_export_needs_no_weights_of_its_source(tmp_path):
    from transformers import AutoModelForCausalLM

    make_llama(tmp_path / "hf", num_hidden_layers=1)
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    bridge.save_megatron_model(model, tmp_path / "megatron")
    wanted = {
        name: weight.clone()
        for name, weight in bridge.export_hf_weights(model, show_progress=False)
    }
    for path in (tmp_path / "hf").glob("*.safetensors*"):
        path.unlink()
    other = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    other.export_ckpt(tmp_path / "megatron", tmp_path / "out", show_progress=False)
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in wanted.items())
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert len(list(other.export_hf_weights(model, show_progress=False))) == len(wanted)
