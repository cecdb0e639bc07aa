# SPDX-License-Identifier: Apache-2.0
"""Estimates of memory against what real models, buffers, optimizers and autograd hold."""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron.bridge.autotune import activations, meta_model
from megatron.bridge.autotune.gpus import GPUS, gpu
from megatron.bridge.autotune.memory import fullest_stage, memory_per_rank
from megatron.bridge.cli.migrate.megatron_lm import translate
from megatron.bridge.cli.migrate.megatron_lm_config import build
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.optim.optimizer import build_optimizer, torch_optimizers
from megatron.bridge.utils.errors import UserError
from tests.toy_run import toy_config
from tests.unit_tests.autotune.models import FAMILIES, SEQUENCE, provider

FAMILY = pytest.mark.parametrize("family", FAMILIES)


def configured(model, mixed_precision="bf16_mixed", **blocks):
    config = toy_config(
        mixed_precision=mixed_precision, train={"micro_batch_size": 1, "global_batch_size": 16}
    )
    config.model = model
    config.dataset.seq_length = SEQUENCE
    return dataclasses.replace(config, **blocks)


def built(config):
    """The run's own model and optimizer, in this process."""
    from megatron.bridge.training.setup import build_model, initialize

    initialize(config)
    chunks = build_model(config)
    return chunks, build_optimizer(config.optimizer, chunks)


def gradient_buffers(chunks):
    return [
        part.grad_data
        for chunk in chunks
        for part in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]


def optimizer_state(optimizer):
    """Moments, and the weights that the optimizer changes: the model's own, or fp32 copies."""
    return [
        tensor
        for inner in torch_optimizers(optimizer)
        for group in inner.param_groups
        for parameter in group["params"]
        for tensor in (
            inner.state[parameter]["exp_avg"],
            inner.state[parameter]["exp_avg_sq"],
            parameter,
        )
    ]


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@FAMILY
@pytest.mark.parametrize("precision", ["bf16_mixed", "fp32"])
def test_states_are_those_of_a_real_run(family, precision):
    config = configured(provider(family), precision)
    config = config.resolve(1).config
    memory = memory_per_rank(config, 1)
    chunks, optimizer = built(config)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    buffers = [buffer for chunk in chunks for buffer in chunk.module.buffers()]
    gradients, state = gradient_buffers(chunks), optimizer_state(optimizer)
    ours = {tensor.data_ptr() for tensor in parameters}
    assert [rank.stage for rank in memory] == [0]
    assert memory[0].parameters == sum(parameter.numel() for parameter in parameters)
    assert memory[0].weights == size(parameters) + size(buffers)
    assert memory[0].gradients == size(gradients)
    assert memory[0].optimizer == size(tensor for tensor in state if tensor.data_ptr() not in ours)


def test_adapters_train_next_to_nothing():
    whole = configured(provider("llama"))
    tuned = configured(provider("llama"), peft=LoRA(dim=4))
    tuned.checkpoint = dataclasses.replace(tuned.checkpoint, pretrained_checkpoint="base")
    whole, tuned = whole.resolve(1).config, tuned.resolve(1).config
    all_weights, adapters = memory_per_rank(whole, 1)[0], memory_per_rank(tuned, 1)[0]
    trained = adapters.parameters - all_weights.parameters
    assert 0 < trained < all_weights.parameters / 20
    assert adapters.gradients == 4 * trained
    assert adapters.optimizer == 12 * trained
    assert adapters.weights == all_weights.weights + 2 * trained


def saved(model):
    """Bytes that autograd keeps for one microbatch through all layers, weights left out."""
    chunk = model.provide_distributed_model(wrap_with_ddp=False)[0]
    weights = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor  # held, so that no other takes its place
        return tensor

    tokens = torch.randint(0, 500, (1, SEQUENCE))
    positions = torch.arange(SEQUENCE)[None]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        chunk(input_ids=tokens, position_ids=positions, attention_mask=None, labels=tokens)
    storages = [tensor.untyped_storage() for tensor in kept.values()]
    return sum(
        {storage._cdata: storage.nbytes() for storage in storages}.values()
    )  # 0 where they were discarded


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family not in ("nemotron_h", "qwen3_next")]
)
@pytest.mark.parametrize("bf16", [True, False])
def test_layers_keep_what_autograd_keeps(family, bf16):
    """Two layers more keep as much more; hooks do not see what recurrent layers keep to recompute."""
    more, less = (saved(provider(family, layers, bf16=bf16)) for layers in (3, 1))
    models = [provider(family, layers, bf16=bf16) for layers in (3, 1)]
    for model in models:
        model.bias_activation_fusion = (
            model.resolved().bias_activation_fusion
        )  # as this machine can
    estimate = estimated(models[0]) - estimated(models[1])
    assert estimate == pytest.approx(more - less, rel=0.1 if family == "gemma2" else 0.05)


def estimated(model):
    config = configured(model, "bf16_mixed" if model.bf16 else "fp32")
    config = config.resolve(1).config
    (chunk,) = meta_model.stage_chunks(model)[0]
    sizes = activations.sizes_of(config)
    return activations._chunk_bytes(model, activations.chunk_counts(chunk, sizes), sizes)[0]


def selective(*modules):
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


RECOMPUTED = [
    selective("mlp"),
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
]


@pytest.mark.parametrize(
    ("family", "values"),
    [
        *(("llama", values) for values in RECOMPUTED),
        *(
            ("deepseek_v3", selective(name))
            for name in ("mla_up_proj", "moe_act", "layernorm", "shared_experts")
        ),
        ("qwen3_moe", selective("layernorm", "moe_act")),
    ],
)
def test_recomputation_keeps_what_autograd_keeps(monkeypatch, family, values):
    # Megatron-Core asks Transformer Engine, which is not here, about FP8
    monkeypatch.setattr(
        random,
        "FP8GlobalStateManager",
        SimpleNamespace(is_fp8_enabled=lambda: False),
        raising=False,
    )
    monkeypatch.setattr(
        random, "activation_recompute_forward", lambda **_: nullcontext(), raising=False
    )
    fused = provider(family, 4).resolved().bias_activation_fusion  # as this machine can

    def model(**more):
        return provider(family, 4, bf16=True, bias_activation_fusion=fused, **more)

    fewer = saved(model()) - saved(model(**values))
    assert estimated(model()) - estimated(model(**values)) == pytest.approx(fewer, rel=0.05)


PP, VP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"


@pytest.mark.parametrize(
    ("layout", "microbatches", "expected"),
    [
        ({PP: 4}, 16, [[4], [3], [2], [1]]),
        ({PP: 4}, 2, [[2], [2], [2], [1]]),
        ({PP: 2, VP: 2}, 8, [[3, 2], [2, 1]]),
        ({PP: 4, VP: 2}, 8, [[7, 4], [5, 4], [4, 3], [4, 1]]),
    ],
)
def test_microbatches_in_flight(layout, microbatches, expected):
    config = configured(provider("llama", 8, **layout))
    config.train.global_batch_size = microbatches
    stages = layout[PP]
    assert [
        activations.microbatches_in_flight(config, stage, stages) for stage in range(stages)
    ] == expected


def test_fullest_rank_decides():
    config = configured(provider("llama", 8, pipeline_model_parallel_size=4))
    config = config.resolve(4).config
    memory = memory_per_rank(config, 4)
    assert fullest_stage(memory).total == max(rank.total for rank in memory)
    assert memory[1].activations > memory[2].activations, "earlier stages hold more microbatches"


def test_nothing_is_left_behind():
    before = {name: value for name, value in vars(parallel_state).items() if name.startswith("_")}
    meta_model.stage_chunks(
        provider("llama", 4, pipeline_model_parallel_size=2, tensor_model_parallel_size=2)
    )
    assert {
        name: value for name, value in vars(parallel_state).items() if name.startswith("_")
    } == before


def test_a_run_starts_with_the_scale_of_no_other_pass(monkeypatch):
    """Megatron-Core would copy [1] into [], which is an error."""
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0))
    built(configured(provider("qwen3_moe")).resolve(1).config)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))


def test_gpus():
    assert gpu("H200 141GB").memory == 141 * 10**9
    assert all(card.bf16 > 1e14 for card in GPUS.values())
    assert gpu("h100") == gpu("H100 80GB")
    with pytest.raises(
        UserError, match="GPU 'H101 80GB' is not in the table; did you mean H100 80GB"
    ):
        gpu("H101 80GB")
    with pytest.raises(UserError, match="'A100' matches A100 40GB, A100 80GB: give the full name"):
        gpu("A100")


@pytest.mark.parametrize(("on_host", "torch_fsdp2"), [(False, True), (True, True), (True, False)])
def test_a_model_is_whole_before_it_is_sharded(on_host, torch_fsdp2):
    """FSDP2 moves a model from the host unit by unit; Megatron-FSDP moves it at once."""
    config = configured(provider("llama"))
    config.model.use_cpu_initialization = on_host
    config.dist.use_torch_fsdp2, config.ddp.use_megatron_fsdp = torch_fsdp2, not torch_fsdp2
    (rank,) = memory_per_rank(config.resolve(world_size=16).config, 16)
    whole = 2 * rank.parameters
    assert (rank.unsharded >= whole) == (not on_host or not torch_fsdp2)
    assert rank.total >= rank.unsharded


@pytest.mark.parametrize("recipe", ["mxfp8", "delayed"])
def test_quantized_layers_keep_their_inputs_in_one_byte(recipe):
    """Both norms' results and the input of the MLP's last layer; delayed scaling adds a copy of attention's output."""
    model = provider("llama", 1, bf16=True)
    config = configured(model)
    (((chunk,),)) = meta_model.stage_chunks(config.model)
    (layer,) = chunk.decoder.layers
    plain = activations.counts_of_layer(layer, activations.sizes_of(config)).kept
    model.fp8, model.fp8_recipe = "e4m3", recipe
    found = activations.counts_of_layer(layer, activations.sizes_of(config)).kept
    tokens = SEQUENCE * config.train.micro_batch_size
    added = tokens * model.hidden_size * 33 // 32 if recipe == "delayed" else 0
    saved = tokens * (2 * model.hidden_size + model.ffn_hidden_size) * (64 - 33) // 32
    assert plain - found == saved - added
    model.first_last_layers_bf16 = True
    assert activations.counts_of_layer(layer, activations.sizes_of(config)).kept == plain


PUBLISHED = """
pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --untie-embeddings-and-output-weights --global-batch-size 8 --seq-length 8192
--max-position-embeddings 8192 --train-iters 25 --tokenizer-type NullTokenizer --mock-data --lr 0.00015
--transformer-impl transformer_engine --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--no-gradient-accumulation-fusion --bf16
"""


@pytest.mark.parametrize(
    ("options", "gigabytes"),
    [
        (
            "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --vocab-size 131073",
            60.58,
        ),
        ("--tensor-model-parallel-size 4 --micro-batch-size 2 --vocab-size 131072", 57.85),
    ],
    ids=["PP4 VP8 on H100", "TP4 on GB200"],
)
def test_published_peaks_of_gpus(options, gigabytes):
    """The tests gpt3_7b_*_memory_speed of Megatron-LM publish what the last of 8 GPUs allocated, here the mean."""
    config = build(translate(f"{PUBLISHED} {options}", 8)).resolve(8).config
    estimate = memory_per_rank(config, 8)[-1]
    assert estimate.total / 1e9 == pytest.approx(gigabytes, rel=0.03)
