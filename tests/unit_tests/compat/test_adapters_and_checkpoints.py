# SPDX-License-Identifier: Apache-2.0
"""What programs do with adapters and checkpoints in single calls."""

import pytest
import torch
from megatron.core import parallel_state

from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA, VLMLoRA
from megatron.bridge.peft.recompute import maybe_enable_recompute_inputs_grad
from megatron.bridge.peft.utils import (
    enable_expert_parallel_grad_sync_in_finalize,
    finalize_model_grads_with_expert_adapter_sync,
)
from megatron.bridge.training.config import InProcessRestartConfig, NVRxStragglerDetectionConfig
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.inprocess_restart import maybe_wrap_for_inprocess_restart
from megatron.bridge.training.nvrx_straggler import NVRxStragglerDetectionManager
from megatron.bridge.training.post_training.checkpointing import (
    has_modelopt_state,
    load_modelopt_state,
)
from megatron.bridge.training.utils.checkpoint_utils import read_run_config
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.optional_imports import installed
from tests.families.vision import harness
from tests.toy_models import make_llama
from tests.toy_run import SEQUENCE, save_llama, toy_config


def logits_of(directory, tokens):
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory).eval()(tokens).logits


def test_adapters_of_a_run_load_in_peft(tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    base = save_llama(tmp_path / "base")
    bridge = AutoBridge.from_hf_pretrained(base)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.calculate_per_token_loss = True
    provider.seq_length = SEQUENCE
    config = toy_config(train={"train_iters": 2}, peft=LoRA(dim=4, alpha=8))
    config.model = provider
    config.checkpoint.save = str(tmp_path / "run")
    config.checkpoint.pretrained_checkpoint = str(base)
    finetune(config, forward_step)
    parallel_state.destroy_model_parallel()
    bridge.export_adapter_ckpt(
        peft_checkpoint=tmp_path / "run", output_path=tmp_path / "adapter", show_progress=False
    )
    model = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter"
    )
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        adapted = model.eval()(tokens).logits
    difference = (adapted - logits_of(base, tokens)).abs().max()
    assert difference > 1e-3
    assert AutoBridge.get_hf_model_id_from_checkpoint(tmp_path / "run") == str(base)
    with pytest.raises(UserError, match=r"exclude_adapter_base_prefixes=.*leave it out"):
        bridge.export_adapter_ckpt(tmp_path / "run", tmp_path / "x", True, ["decoder"])


def test_config_of_a_pruned_model(tmp_path):
    """A checkpoint with fewer layers becomes a model that transformers loads."""
    (tmp_path / "hf").mkdir()
    make_llama(tmp_path / "hf")
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.num_layers = 2
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    bridge.save_megatron_model(model, tmp_path / "pruned")
    pruned = AutoBridge.from_auto_config(
        megatron_path=str(tmp_path / "pruned"), hf_model_id=str(tmp_path / "hf")
    )
    assert pruned.hf_config.num_hidden_layers == 2
    assert pruned.hf_config.name_or_path == str(tmp_path / "hf")
    pruned.export_ckpt(tmp_path / "pruned", tmp_path / "out", show_progress=False)
    tokens = torch.arange(12)[None]
    positions = torch.arange(12)[None]
    with torch.no_grad():
        expected = model[0](input_ids=tokens, position_ids=positions, attention_mask=None)
    torch.testing.assert_close(logits_of(tmp_path / "out", tokens), expected, atol=1e-5, rtol=1e-5)


def test_source_of_an_imported_checkpoint(tmp_path):
    (tmp_path / "hf").mkdir()
    make_llama(tmp_path / "hf")
    AutoBridge.import_ckpt(tmp_path / "hf", tmp_path / "megatron", show_progress=False)
    name = AutoBridge.get_hf_model_id_from_checkpoint(tmp_path / "megatron")
    assert name == str(tmp_path / "hf")
    stored = read_run_config(tmp_path / "megatron/iter_0000000/run_config.yaml")
    assert stored["hf_model_id"] == name


# ------------------------------------------------------------------------------------------------------------ adapters


@pytest.mark.parametrize("part", ["vision_model", "vision_projection"])
def test_tower_or_projector_is_trained_with_adapters(vision_case, part):
    case = vision_case("qwen2_5_vl")
    method = VLMLoRA(target_modules=["linear_qkv"], dim=2, **{f"freeze_{part}": False})
    _, model = harness.build(case, "one")
    method(model)
    trained = {name for name, value in model[0].named_parameters() if value.requires_grad}
    adapters = {name for name in trained if ".adapter." in name}
    projector = {name for name in trained if "merger" in name}
    tower = {name for name in trained if name.startswith("vision.")} - projector
    assert adapters
    assert trained == adapters | projector | tower
    assert bool(tower) is (part == "vision_model")
    assert bool(projector) is (part == "vision_projection")
    with (
        pytest.raises(UserError, match=rf"peft\.freeze_{part}=False"),
        method.disable_adapter(model),
    ):
        pass


def test_adapters_next_to_a_trained_decoder_are_refused():
    with pytest.raises(UserError, match=r"peft.freeze_language_model=False.*without peft"):
        VLMLoRA(freeze_language_model=False)(torch.nn.Linear(2, 2))


def adapted_toy():
    config = toy_config()
    config.model.initialize_model_parallel(seed=1)
    return config.model.provide_distributed_model(
        wrap_with_ddp=True,
        pre_wrap_hook=LoRA(dim=2, lora_B_init_method="xavier", lora_A_init_method="zero"),
    )


def test_recomputation_after_adapters():
    model = adapted_toy()
    changed = maybe_enable_recompute_inputs_grad(model)
    assert changed == maybe_enable_recompute_inputs_grad(model, changed)
    chunk = model[0].module
    chunk.config.recompute_granularity = "full"
    chunk.config.recompute_method = "uniform"
    chunk.config.recompute_num_layers = 1
    maybe_enable_recompute_inputs_grad(model)
    tokens = torch.arange(SEQUENCE)[None]
    model[0](tokens, tokens, None, labels=tokens).sum().backward()
    gradients = [value.main_grad for value in chunk.parameters() if value.requires_grad]
    assert any(gradient.abs().sum() > 0 for gradient in gradients)
    assert enable_expert_parallel_grad_sync_in_finalize(model) == 0
    finalize_model_grads_with_expert_adapter_sync(model, torch.tensor(SEQUENCE))


# ------------------------------------------------------------------------------------------------------- other programs


def test_state_of_modelopt(tmp_path):
    (tmp_path / "iter_0000002").mkdir()
    assert not has_modelopt_state(str(tmp_path))
    assert not has_modelopt_state(str(tmp_path), ckpt_step=2)
    (tmp_path / "iter_0000002/modelopt_state").mkdir()
    assert has_modelopt_state(str(tmp_path), ckpt_step=2)
    assert has_modelopt_state(str(tmp_path / "iter_0000002"))
    with pytest.raises(UserError, match=r"has no modelopt_state"):
        load_modelopt_state([], str(tmp_path / "iter_0000002"), ckpt_step=7)
    if not installed("modelopt"):
        with pytest.raises(UserError, match=r"uv pip install nvidia-modelopt"):
            load_modelopt_state([], str(tmp_path), ckpt_step=2)


def test_restarts_of_other_loops_are_refused():
    assert maybe_wrap_for_inprocess_restart(print, InProcessRestartConfig(enabled=False), None) == (
        print,
        None,
    )
    with pytest.raises(UserError, match=r"inprocess_restart.*launcher"):
        maybe_wrap_for_inprocess_restart(print, InProcessRestartConfig(), None)


@pytest.mark.skipif(installed("nvidia_resiliency_ext"), reason="the package is there")
def test_detection_of_slow_gpus_names_its_package():
    with pytest.raises(UserError, match=r"nvrx_straggler.*resiliency"):
        NVRxStragglerDetectionManager(NVRxStragglerDetectionConfig())


def test_generation_from_images_names_the_engine_to_use():
    from megatron.bridge.inference.vlm.base import setup_model_and_tokenizer

    with pytest.raises(UserError, match=r"setup_model_and_tokenizer.*LLM\(path\)\.chat"):
        setup_model_and_tokenizer("megatron", tp=1)
