# SPDX-License-Identifier: Apache-2.0
"""The calls of RL and post-training frameworks, in their order and with their keywords, on a toy model.

Each function is one framework's plain path: it builds, loads, sends weights to an inference engine, and saves. It
returns what the other side receives: Hugging Face names and sums of tensors.
"""

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallelConfig as CoreDDPConfig
from megatron.core.transformer.enums import AttnBackend
from safetensors.torch import save_file

from megatron.bridge import AutoBridge

LORA = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


def sums(items):
    return {item[0]: item[1].double().sum().item() for item in items}


def initialize(tensor_parallel):
    """What all of them do before they touch a bridge."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(
            name, None
        )  # Megatron-Core's marks of the attention that a model before this one had
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mpu.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    from megatron.core import tensor_parallel as tp

    tp.model_parallel_cuda_manual_seed(1)


def replay(framework, directory, out, tensor_parallel, lora):
    """Run one framework's calls on this rank."""
    initialize(tensor_parallel)
    out = Path(out)
    if dist.get_rank() == 0:
        out.mkdir(parents=True)
    dist.barrier()
    return FRAMEWORKS[framework](Path(directory), out, tensor_parallel, lora)


# ---- verl -------------------------------------------------------------------------------------------------------


def verl(directory, out, tensor_parallel, lora):
    from megatron.bridge.training.utils.config_utils import create_ddp_config

    bridge = AutoBridge.from_hf_pretrained(str(directory), trust_remote_code=False)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.apply_overrides_and_finalize(
        dtype=torch.float32, overrides=_verl_overrides(tensor_parallel)
    )
    peft = _verl_peft(provider, lora)
    ddp_config = create_ddp_config(
        wrap_with_ddp=True,
        use_distributed_optimizer=True,
        use_megatron_fsdp=False,
        overrides={"grad_reduce_in_fp32": True},
    )
    module = provider.provide_distributed_model(
        wrap_with_ddp=True,
        ddp_config=ddp_config,
        fp16=provider.fp16,
        bf16=provider.bf16,
        use_megatron_fsdp=False,
    )
    bridge.load_hf_weights(module, str(directory), allowed_mismatched_params=[])
    tasks = bridge.get_conversion_tasks(module)
    if lora:
        _base_is_computed_without_adapters(module, peft)
        base = sums(
            bridge.export_hf_weights(module, conversion_tasks=tasks, merge_adapter_weights=False)
        )
        sent = {**base, **sums(bridge.export_adapter_weights(module))}
        bridge.save_hf_adapter(module, str(out / "adapter"), peft)
        return sent
    if dist.get_rank() == 0:  # config and tokenizer come first
        (out / "config.json").write_bytes((directory / "config.json").read_bytes())
        (out / "tokenizer.json").write_text("the framework's own")
    dist.barrier()
    bridge.save_hf_weights(module, str(out), strict=True)
    assert (out / "tokenizer.json").read_text() == "the framework's own"
    return sums(bridge.export_hf_weights(module, conversion_tasks=tasks))


@torch.no_grad()
def _base_is_computed_without_adapters(module, peft):
    ids = torch.arange(16).reshape(2, 8)

    def logits():
        return module[0](input_ids=ids, position_ids=ids % 8, attention_mask=None)

    before = logits()  # B is zero, so these are the base's
    factors = [
        parameter for name, parameter in module[0].named_parameters() if name.endswith(".adapter.b")
    ]
    for factor in factors:
        factor.add_(0.5)
    assert not torch.allclose(logits(), before)
    with peft.disable_adapter(module):
        assert torch.equal(logits(), before)
    assert not torch.allclose(logits(), before)
    for factor in factors:
        factor.zero_()


def _verl_overrides(tensor_parallel):
    return {
        "tensor_model_parallel_size": tensor_parallel,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "sequence_parallel": tensor_parallel > 1,
        "overlap_p2p_comm": False,
        "batch_p2p_comm": False,
        "variable_seq_lengths": True,
        "attention_backend": AttnBackend.flash,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
    }


def _verl_peft(provider, lora):
    from megatron.bridge.peft.utils import create_peft, create_peft_hook

    settings = {
        "type": "lora",
        "merge": False,
        "rank": 4 if lora else 0,
        "alpha": 8,
        "dropout": 0.0,
        "target_modules": LORA,
        "exclude_modules": [],
        "dropout_position": "pre",
        "lora_A_init_method": "xavier",
        "lora_B_init_method": "zero",
        "a2a_experimental": False,
        "dtype": None,
        "adapter_path": None,
        "freeze_vision_model": True,
    }
    peft = create_peft(settings, dtype=torch.float32)
    if peft is not None:
        provider.register_pre_wrap_hook(create_peft_hook(peft, training=True))
    return peft


def verl_critic(directory, out, tensor_parallel, lora):
    """A value head on a model whose output layer is tied to its embeddings."""
    from megatron.bridge.training.utils.train_utils import make_value_model

    del lora
    bridge = AutoBridge.from_hf_pretrained(str(directory))
    provider = bridge.to_megatron_provider(load_weights=False)
    overrides = {**_verl_overrides(tensor_parallel), "share_embeddings_and_output_weights": False}
    provider.apply_overrides_and_finalize(dtype=torch.float32, overrides=overrides)
    provider.register_pre_wrap_hook(
        make_value_model(provider.hidden_size, provider.sequence_parallel)
    )
    module = provider.provide_distributed_model(
        wrap_with_ddp=True,
        ddp_config=CoreDDPConfig(),
        fp16=False,
        bf16=False,
        use_megatron_fsdp=False,
    )
    bridge.load_hf_weights(
        module, str(directory), allowed_mismatched_params=["output_layer.weight"]
    )
    ids = torch.arange(16).reshape(2, 8)
    values = module[0](input_ids=ids, position_ids=ids % 8, attention_mask=None)
    assert values.shape == (2, 8, 1)
    bridge.save_hf_weights(module, str(out), strict=True)
    return sums(bridge.export_hf_weights(module))


def probe(directory, out, tensor_parallel, lora):
    """verl's delta export: a copy of each mapping without communication turns a delta into the tensor's."""
    import copy

    del lora, out
    bridge = AutoBridge.from_hf_pretrained(str(directory))
    provider = bridge.to_megatron_provider()
    provider.tensor_model_parallel_size = tensor_parallel
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    whole = {name: weight.clone() for name, weight in bridge.export_hf_weights(model)}
    known = 0
    for task in bridge.get_conversion_tasks(megatron_model=model):
        mapping = copy.copy(task.mapping)
        mapping.pp_group, mapping.ep_group = (
            _Silent(mapping.pp_rank, 1),
            _Silent(0, mapping.ep_size),
        )
        mapping._tp_group = _Silent(task.mapping.tp_rank, task.mapping.tp_size)
        mapping._etp_group = _Silent(0, 1)
        mapping.gather_from_tp_ranks = lambda tensor, it=mapping: [
            tensor if rank == it.tp_rank else torch.full_like(tensor, float("nan"))
            for rank in range(it.tp_size)
        ]
        assert not mapping.is_expert
        plain = task.param_weight.detach().clone()  # without the marks of a parameter
        for name, tensor in mapping.megatron_to_hf(plain, task.megatron_module).items():
            mine = ~torch.isnan(tensor)
            assert torch.equal(tensor[mine], whole[name][mine]), name
            known += mine.sum().item()
    return {"known": known, "all": sum(weight.numel() for weight in whole.values())}


class _Silent:
    """A group that tells its size, and nothing else."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


# ---- SkyRL ------------------------------------------------------------------------------------------------------


def skyrl(directory, out, tensor_parallel, lora):
    from megatron.bridge.models.conversion.peft_bridge import (
        build_adapter_config_dict,
        infer_target_modules_from_adapter_weights,
    )

    bridge, provider = _plain(directory, tensor_parallel)
    provider.attention_backend = "flash"
    provider.finalize()
    peft = _skyrl_lora(provider) if lora else None
    config = CoreDDPConfig()
    config.use_distributed_optimizer = True
    model = provider.provide_distributed_model(ddp_config=config, wrap_with_ddp=True, bf16=False)
    bridge.load_hf_weights(model)
    tasks = bridge.get_conversion_tasks(model)
    sizes = [
        task.param_weight.numel()
        * task.mapping.tp_size
        * (task.mapping.ep_size if task.mapping.is_expert else 1)
        for task in tasks
    ]
    assert all(sizes)
    sent = {}
    for half in (tasks[: len(tasks) // 2], tasks[len(tasks) // 2 :]):
        items = bridge.export_hf_weights(
            model, show_progress=False, conversion_tasks=half, merge_adapter_weights=not lora
        )
        sent |= sums(items)
    if lora:
        state = {
            f"base_model.model.{name}": tensor.clone().float()
            for name, tensor in bridge.export_adapter_weights(model, cpu=True, show_progress=False)
        }
        if dist.get_rank() == 0:
            modules = infer_target_modules_from_adapter_weights(state.keys())
            where = str(
                bridge.hf_pretrained.model_name_or_path or bridge.hf_pretrained.name_or_path
            )
            about = build_adapter_config_dict(
                peft, target_modules=modules, base_model_name_or_path=where
            )
            (out / "adapter").mkdir()
            save_file(state, out / "adapter" / "adapter_model.safetensors")
            (out / "adapter" / "adapter_config.json").write_text(json.dumps(about))
        dist.barrier()
        return sent
    for every in (1, 2):  # twice to the same folder
        bridge.save_hf_weights(
            model, str(out), strict=False, distributed_save=True, save_every_n_ranks=every
        )
    bridge.save_hf_weights(model, str(out), strict=False, distributed_save=False)
    if dist.get_rank() == 0:
        bridge.hf_pretrained.save_artifacts(str(out))
    dist.barrier()
    return sent


def _skyrl_lora(provider):
    from megatron.bridge.peft.lora import LoRA

    peft = LoRA(
        target_modules=LORA,
        dim=4,
        alpha=8,
        dropout=0.0,
        lora_A_init_method="xavier",
        lora_B_init_method="zero",
        exclude_modules=[],
        lora_dtype=torch.float32,
    )

    def lora_pre_wrap_hook(model):
        adapted = peft(model, training=True)
        peft.set_params_to_save(adapted)
        return adapted

    provider.register_pre_wrap_hook(lora_pre_wrap_hook)
    return peft


def _plain(directory, tensor_parallel):
    bridge = AutoBridge.from_hf_pretrained(str(directory), trust_remote_code=True)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.tensor_model_parallel_size = tensor_parallel
    provider.pipeline_model_parallel_size = 1
    provider.sequence_parallel = tensor_parallel > 1
    provider.variable_seq_lengths = True
    provider.moe_token_dispatcher_type = "alltoall"
    return bridge, provider


# ---- miles ------------------------------------------------------------------------------------------------------


def miles(directory, out, tensor_parallel, lora):
    from megatron.bridge.training.config import DistributedDataParallelConfig

    bridge, provider = _plain(directory, tensor_parallel)
    provider.moe_router_load_balancing_type = "none"
    provider.finalize()
    if lora:
        _skyrl_lora(provider)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    config.finalize()
    model = provider.provide_distributed_model(wrap_with_ddp=True, ddp_config=config)
    bridge.load_hf_weights(model)
    tasks = [
        dataclasses.replace(task, param_weight=task.param_weight.detach().clone())
        for task in bridge.get_conversion_tasks(model)
    ]
    sent = {}
    for hf_name, weight, megatron_name in bridge.export_hf_weights(
        model,
        cpu=False,
        conversion_tasks=tasks,
        merge_adapter_weights=False,
        with_megatron_names=True,
    ):
        assert megatron_name.split(".")[0] in ("embedding", "decoder", "output_layer")
        sent[hf_name] = weight.double().sum().item()
    if lora:
        for hf_name, weight, megatron_name in bridge.export_adapter_weights(
            model, cpu=True, show_progress=False, with_megatron_names=True
        ):
            assert megatron_name.endswith(".weight")
            sent[hf_name] = weight.double().sum().item()
    bridge.save_hf_pretrained(model, path=out)
    return sent


# ---- AReaL ------------------------------------------------------------------------------------------------------


def areal(directory, out, tensor_parallel, lora):
    from megatron.bridge.peft.lora import LoRA

    bridge, provider = _plain(directory, tensor_parallel)
    provider.account_for_embedding_in_pipeline_split = False
    provider.pipeline_dtype = torch.float32
    provider.gradient_accumulation_fusion = False
    provider.finalize()
    models = provider.provide_distributed_model(
        ddp_config=CoreDDPConfig(use_distributed_optimizer=not lora),
        fp16=False,
        bf16=False,
        use_megatron_fsdp=False,
        use_torch_fsdp2=False,
        wrap_with_ddp=not lora,
        overlap_param_gather_with_optimizer_step=False,
    )
    model = _ModelList(models)
    bridge.load_hf_weights(model, hf_path=str(directory))
    if lora:
        peft = LoRA(target_modules=LORA, dim=4, alpha=8, dropout=0.0)
        model = _ModelList(peft(model, training=True))
        peft.set_params_to_save(model)
        assert all(".adapter." in name for name in peft.params_to_save)
        bridge.save_hf_adapter(
            model, path=out / "adapter", peft_config=peft, base_model_name_or_path=str(directory)
        )
        return {}
    for _ in range(2):  # the same folder again and again, and the tokenizer after each
        bridge.save_hf_pretrained(model, str(out), source_path=str(directory))
        if dist.get_rank() == 0:
            (out / "tokenizer.json").write_text("the framework's own")
        dist.barrier()
    assert (out / "tokenizer.json").read_text() == "the framework's own"
    return {}


class _ModelList(list):
    """Chunks that can be asked for their parameters together."""


# ---- ms-swift ---------------------------------------------------------------------------------------------------


def ms_swift(directory, out, tensor_parallel, lora):
    """Full weights: with adapters it refuses this bridge itself."""
    from transformers import AutoConfig

    del lora
    hf_config = AutoConfig.from_pretrained(directory)
    bridge = AutoBridge.from_hf_config(hf_config)
    assert AutoBridge.supports(hf_config)
    provider = bridge.to_megatron_provider(load_weights=False)
    names = {field.name for field in dataclasses.fields(provider)}
    args = SimpleNamespace(
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=tensor_parallel > 1,
        moe_token_dispatcher_type="alltoall",
    )
    overrides = {name: value for name, value in vars(args).items() if name in names}
    overrides |= {
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "variable_seq_lengths": True,
    }
    provider.apply_overrides_and_finalize(dtype=torch.bfloat16, overrides=overrides)
    provider.swiglu = True
    models = provider.provide_distributed_model(
        wrap_with_ddp=False, mixed_precision_wrapper=None, use_cpu_initialization=False
    )
    assert {parameter.dtype for parameter in models[0].parameters()} == {torch.bfloat16}
    models[0].config.bridge = bridge
    bridge.load_hf_weights(models, hf_path=str(directory))
    exported = {item.param_name: item.weight for item in bridge.export_hf_weights(models, cpu=True)}
    bridge.save_hf_weights(models, path=str(out))
    if dist.get_rank() == 0:
        hf_config.dtype = torch.bfloat16
        hf_config.save_pretrained(out)
    dist.barrier()
    return sums(exported.items())


FRAMEWORKS = {
    "verl": verl,
    "verl critic": verl_critic,
    "verl delta": probe,
    "SkyRL": skyrl,
    "miles": miles,
    "AReaL": areal,
    "ms-swift": ms_swift,
}
