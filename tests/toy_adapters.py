# SPDX-License-Identifier: Apache-2.0
"""Tiny models with adapters, and the same ones made by the ``peft`` library."""

import warnings

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from megatron.bridge import AutoBridge
from megatron.bridge.training.config import OptimizerConfig
from megatron.bridge.training.optim.optimizer import build_optimizer
from tests.toy_models import make_llama, randomise, tokens

DECODER = {
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
# rows that divide into the groups of low-bit formats, also over two ranks
WIDE = {**DECODER, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
ROWS, LENGTH = 4, 16
LEARNING_RATE = 1e-3
EPSILON = 1e-8


def make(kind, directory=None):
    """A tiny Hugging Face model; the same numbers every time."""
    others = {
        "llama": lambda: make_llama(**DECODER),
        "wide_llama": lambda: make_llama(**WIDE),
        "wide_experts": lambda: _with_experts("qwen3_moe", {**WIDE, "moe_intermediate_size": 128}),
        "nemotron_h": _with_mamba,
        "bamba": _with_one_group,
        "gemma4": _with_shared_keys,
    }
    model = others[kind]() if kind in others else _with_experts(kind)
    if directory is not None:
        model.save_pretrained(directory)
    return model


def _with_experts(kind, decoder=DECODER):
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    if kind == "mixtral":
        model = MixtralForCausalLM(
            MixtralConfig(**decoder, num_local_experts=4, num_experts_per_tok=2)
        )
    else:
        experts = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        }
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**experts, **decoder}))
    randomise(model)
    return model.eval()


def _with_mamba():
    from transformers import NemotronHConfig, NemotronHForCausalLM

    sizes = {
        "mamba_num_heads": 4,
        "mamba_head_dim": 6,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 8,
    }
    model = {key: value for key, value in DECODER.items() if key != "num_hidden_layers"}
    torch.manual_seed(0)
    model = NemotronHForCausalLM(NemotronHConfig(**model, **sizes, hybrid_override_pattern="M-*"))
    randomise(model)
    return model.eval()


def _with_one_group():
    from transformers import BambaConfig, BambaForCausalLM

    model = {key: value for key, value in DECODER.items() if key != "head_dim"}
    sizes = {
        "mamba_n_heads": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "attn_layer_indices": [1],
    }
    torch.manual_seed(0)
    model = BambaForCausalLM(BambaConfig(**model, **sizes))
    randomise(model)
    return model.eval()


def _with_shared_keys():
    """Layers that project queries, keys and values; queries and keys; queries."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    sizes = {"global_head_dim": 24, "pad_token_id": None, "sliding_window": 9}
    sizes |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": DECODER["vocab_size"]}
    kinds = {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }
    shared = {"attention_k_eq_v": True, "num_kv_shared_layers": 1, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = Gemma4ForCausalLM(Gemma4TextConfig(**{**DECODER, **sizes, **kinds, **shared}))
    randomise(model)
    for (
        layer
    ) in model.model.layers:  # scores have no other scale; large ones make rounding errors grow
        layer.self_attn.q_norm.weight.data /= 8
    return model.eval()


def make_gpt_oss_mxfp4(directory):
    """A tiny gpt-oss in float32 whose experts have random codes of MXFP4."""
    import json

    from safetensors.torch import load_file, save_file
    from transformers import GptOssConfig, GptOssForCausalLM

    from tests.quantize import random_mxfp4

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    sizes |= {"vocab_size": DECODER["vocab_size"], "max_position_embeddings": 64}
    torch.manual_seed(0)
    GptOssForCausalLM(GptOssConfig(**sizes)).save_pretrained(directory)
    stored = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = stored.pop(name).shape
        blocks, scales = random_mxfp4(experts, rows, columns, generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (directory / "config.json").write_text(json.dumps(config))


def batch():
    """Token ids and labels [rows, length], positions alike."""
    ids, positions = tokens(ROWS, LENGTH + 1, DECODER["vocab_size"])
    return ids[:, :-1], ids[:, 1:].contiguous(), positions[:, :-1]


def adapted(directory, peft, layout=None, ddp=True, **settings):
    """Bridge and chunks of this rank, with the adapters of ``peft``."""
    bridge = AutoBridge.from_hf_pretrained(directory)
    provider = bridge.to_megatron_provider()
    if provider.num_moe_experts:
        provider.moe_aux_loss_coeff = (
            0.0  # transformers adds this loss only if asked for the router's logits
        )
    for name, value in {**(layout or {}), **settings}.items():
        setattr(provider, name, value)
    provider.register_pre_wrap_hook(peft)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return bridge, provider.provide_distributed_model(wrap_with_ddp=ddp, ddp_config=config)


@torch.no_grad()
def shake(bridge, model, scratch):
    """Give all adapters random values that do not depend on the layout, by way of the format of ``peft``."""
    from safetensors.torch import load_file, save_file

    bridge.save_hf_adapter(model, scratch, show_progress=False)
    if torch.distributed.get_rank() == 0:
        found = load_file(scratch / "adapter_model.safetensors")
        save_file(shaken(found), scratch / "adapter_model.safetensors", metadata={"format": "pt"})
    torch.distributed.barrier()
    bridge.load_hf_adapter(model, scratch)


def shaken(found):
    """Random values; factors A that were shared stay shared."""
    generator = torch.Generator().manual_seed(5)
    result, shared = {}, {}
    for name in sorted(found):
        tensor = found[name]
        key = tensor.numpy().tobytes() if "lora_A" in name else name
        if key not in shared:
            shared[key] = 0.2 * torch.randn(tensor.shape, generator=generator)
        result[name] = tensor + shared[key] if "magnitude" in name else shared[key].clone()
    return result


def exported(bridge, model):
    """The adapters by their names in the format of ``peft``."""
    return {
        name: weight.clone()
        for name, weight in bridge.export_adapter_weights(
            model, show_progress=False, prefix="base_model.model."
        )
    }


def train(model, steps, epsilon=EPSILON):
    """Optimise the adapters on one batch under any layout: losses, as the last stage knows them.

    A large ``epsilon`` keeps Adam from magnifying the rounding of gradients that are nearly zero.
    """
    optimizer = build_optimizer(
        OptimizerConfig(
            lr=LEARNING_RATE,
            weight_decay=0.0,
            clip_grad=0.0,
            adam_eps=epsilon,
            use_distributed_optimizer=False,
        ),
        model,
    )
    return [step(model, optimizer) for _ in range(steps)]


def step(model, optimizer):
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = gradients(model)
    succeeded, _, _ = optimizer.step()
    assert succeeded
    return losses


def gradients(model):
    """Run forward and backward over the batch, a row a microbatch; the mean loss on the last stage."""
    ids, labels, positions = batch()

    def step(rows, chunk):
        row = slice(index := next(rows), index + 1)
        logits = chunk(input_ids=ids[row], position_ids=positions[row], attention_mask=None)
        return logits, lambda out: _loss(out, labels[row])

    model[0].config.finalize_model_grads_func = finalize_model_grads
    outcome = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(range(ROWS)) for _ in model],
        model=model,
        num_microbatches=ROWS,
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )
    return sum(entry["loss"] for entry in outcome) / ROWS if outcome else None


def _loss(logits, labels):
    losses = vocab_parallel_cross_entropy(
        logits.transpose(0, 1).contiguous(), labels.transpose(0, 1)
    )
    return losses.mean(), {"loss": losses.mean().item()}


def reference(kind, adapter, share):
    """The model with the adapter as the ``peft`` library loads it, trainable.

    Args:
        kind: Of the base.
        adapter: Directory.
        share: Whether projections that Megatron fuses share their factor A.
    """
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(make(kind), adapter, is_trainable=True)
    return share_factors(model) if share else model


def share_factors(model):
    """One factor A for the projections that Megatron fuses."""
    for module in model.modules():
        _share(module, "q_proj", "k_proj", "v_proj")
        _share(module, "gate_proj", "up_proj")
    return model


def _share(module, *names):
    found = [getattr(module, name, None) for name in names]
    if all(hasattr(one, "lora_A") for one in found):
        for one in found[1:]:
            one.lora_A["default"].weight = found[0].lora_A["default"].weight


def reference_loss(model):
    """The mean loss over the batch."""
    ids, labels, _ = batch()
    logits = model(ids).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def reference_train(model, steps):
    """Losses of the same optimisation by torch."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        loss = reference_loss(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved_by_peft(model):
    """The adapter's tensors by the names that ``peft`` saves them under."""
    from peft import get_peft_model_state_dict

    return {
        name: tensor.detach().clone() for name, tensor in get_peft_model_state_dict(model).items()
    }


def is_last_stage():
    return parallel_state.is_pipeline_last_stage()
