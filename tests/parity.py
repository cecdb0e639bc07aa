# SPDX-License-Identifier: Apache-2.0
"""Which models are compared under which layouts with one process, how, and how far apart they may be.

The one table behind ``tests/functional_tests/training/test_parity.py`` and docs/parity.md (``make parity``).
"""

import functools
from dataclasses import asdict, dataclass, field, replace

import torch

from megatron.bridge.training.config import (
    DistributedDataParallelConfig,
    DistributedInitConfig,
    OptimizerConfig,
    ValidationConfig,
)
from tests.toy_run import first_weight, run_toy, whole_weights
from tests.toy_samples import dataset
from tests.workers import forget_model_parallel, leave

STEPS = 10
"""Of the page; the tests take the first few."""


@dataclass(frozen=True)
class Figures:
    """Largest differences over a run: of numbers relative to them, of weights (0.05 to 1 large) absolute.

    Attributes:
        losses: of the loss of each step.
        held_out: of the losses of both evaluations.
        further: of the other losses that are logged: multi-token prediction, load balancing, router logits.
        grad_norms: of the gradient norm of each step.
        weights: of any final weight.
    """

    losses: float
    held_out: float
    further: float
    grad_norms: float
    weights: float

    def beyond(self, tolerance):
        """The figures above ``tolerance``, with it."""
        limits = asdict(tolerance)
        return {
            name: (value, limits[name])
            for name, value in asdict(self).items()
            if not value <= limits[name]
        }


FP32 = Figures(losses=2e-7, held_out=1.5e-7, further=2.5e-7, grad_norms=8e-7, weights=2.5e-7)


@dataclass(frozen=True)
class Model:
    """A toy: fields over those of ``tests.toy_run``, what it learns from, and how far apart layouts may be."""

    fields: dict = field(default_factory=dict)
    data: str = "mock"
    tolerance: Figures = FP32


TIED = {"share_embeddings_and_output_weights": True}
MEANS = {"calculate_per_token_loss": False}  # a mean over microbatches of means over tokens
EXPERTS = {
    "num_moe_experts": 4,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1e-2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
    "moe_token_dispatcher_type": "alltoall",
}
LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": None,
    "qk_layernorm": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 10,
}

MODELS = {
    "dense": Model(),
    "dense, tied embeddings": Model(TIED),
    "dense, means of microbatches": Model(MEANS),
    "dense, 3 layers": Model({"num_layers": 3}),
    "experts": Model(EXPERTS),
    "experts, means of microbatches": Model(EXPERTS | MEANS),
    "norms across heads": Model({"qk_norm_across_heads": True}),
    "norms of heads": Model({"qk_layernorm": True}),
    # its gradient norm jumps (0.6, then 1.7): there it hangs on the last bits of the weights ten times as much
    "latent attention": Model(LATENT, tolerance=replace(FP32, grad_norms=3e-6)),
    "latent attention, experts, 1 further token": Model(LATENT | EXPERTS | {"mtp_num_layers": 1}),
    "2 further tokens": Model({"mtp_num_layers": 2}),
    "2 further tokens, tied embeddings": Model(TIED | {"mtp_num_layers": 2}),
    "2 further tokens, means of microbatches": Model(MEANS | {"mtp_num_layers": 2}),
    "packed": Model(data="packed"),
    "padding-free": Model(data="padding-free"),
    "packed, 2 further tokens": Model({"mtp_num_layers": 2}, "packed"),
    "packed, experts": Model(EXPERTS, "packed"),
    "dropout of hidden states": Model({"hidden_dropout": 0.2}),
}


@dataclass(frozen=True)
class Layout:
    """How a model is spread."""

    processes: int
    model: dict = field(default_factory=dict)
    ddp: dict = field(default_factory=dict)
    dist: dict = field(default_factory=dict)


TP2 = {"tensor_model_parallel_size": 2}
TP2_SP = TP2 | {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
PP4 = {"pipeline_model_parallel_size": 4}
PP2_VP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2, "cp_comm_type": "all_gather"}
CP2_EXCHANGE = {"context_parallel_size": 2, "cp_comm_type": "a2a"}
CP2_RING = {"context_parallel_size": 2, "cp_comm_type": "p2p"}
CP4_LEVELS = {
    "context_parallel_size": 4,
    "cp_comm_type": "a2a+p2p",
    "hierarchical_context_parallel_sizes": [2, 2],
}
EP2 = {"expert_model_parallel_size": 2}
WHOLE_EXPERTS = {"expert_tensor_parallel_size": 1}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
REPLICATED = {"use_distributed_optimizer": False}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 2000}
FSDP2 = {"use_torch_fsdp2": True}
MEGATRON_FSDP = {"use_megatron_fsdp": True}
STATE_CUT = MEGATRON_FSDP | {"data_parallel_sharding_strategy": "optim", "bucket_size": 2000}
GRADIENTS_CUT = MEGATRON_FSDP | {
    "data_parallel_sharding_strategy": "optim_grads",
    "bucket_size": 2000,
}

LAYOUTS = {
    "TP2": Layout(2, TP2),
    "TP2+SP": Layout(2, TP2_SP),
    "TP2, full recomputation": Layout(2, TP2 | FULL),
    "TP2+SP, full recomputation": Layout(2, TP2_SP | FULL),
    "PP2": Layout(2, PP2),
    "PP2, selective recomputation": Layout(2, PP2 | SELECTIVE),
    "PP2, 1 layer in the first stage": Layout(2, PP2 | {"num_layers_in_first_pipeline_stage": 1}),
    "PP2, 1 layer in the last stage": Layout(2, PP2 | {"num_layers_in_last_pipeline_stage": 1}),
    "PP2, embedding counts as a layer": Layout(
        2, PP2 | {"account_for_embedding_in_pipeline_split": True}
    ),
    "PP2, loss counts as a layer": Layout(2, PP2 | {"account_for_loss_in_pipeline_split": True}),
    "PP2, stages Ettt and tL": Layout(2, PP2 | {"pipeline_model_parallel_layout": "Ettt|tL"}),
    "PP2, stages Ettt and tmmL": Layout(2, PP2 | {"pipeline_model_parallel_layout": "Ettt|tmmL"}),
    "PP2+VP2": Layout(2, PP2_VP2),
    "PP2+VP2, stages E, tt, t and tL": Layout(
        2, PP2_VP2 | {"pipeline_model_parallel_layout": "E|tt|t|tL"}
    ),
    "PP2+VP3, embedding and loss count as layers": Layout(
        2,
        PP2
        | {"virtual_pipeline_model_parallel_size": 3}
        | {
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
    ),
    "CP2, all-gather": Layout(2, CP2),
    "CP2, all-to-all": Layout(2, CP2_EXCHANGE),
    "CP2, ring": Layout(2, CP2_RING),
    "CP4, ring": Layout(4, CP2_RING | {"context_parallel_size": 4}),
    "CP4, all-to-all within 2 and ring": Layout(4, CP4_LEVELS),
    "TP2+SP x CP2, ring": Layout(4, TP2_SP | CP2_RING),
    "CP2, kinds by layer": Layout(2, CP2 | {"cp_comm_type": ["p2p", "all_gather", "a2a", "p2p"]}),
    "DP2": Layout(2, {}, REPLICATED),
    "DP2, distributed optimizer": Layout(2),
    "DP2, overlapped reduce": Layout(2, {}, REPLICATED | {"overlap_grad_reduce": True}),
    "DP2, distributed optimizer, overlapped reduce and gather": Layout(2, {}, OVERLAPPED),
    "DP2, average in collective": Layout(2, {}, {"average_in_collective": True}),
    "EP2": Layout(2, EP2),
    "EP2, tokens by all-gather": Layout(2, EP2 | {"moe_token_dispatcher_type": "allgather"}),
    "TP2+SP x EP2, ETP1": Layout(2, TP2_SP | EP2 | WHOLE_EXPERTS),
    "CP2 x EP2": Layout(2, CP2 | EP2),
    "TP2 x PP2": Layout(4, TP2 | PP2),
    "TP2+SP x PP2": Layout(4, TP2_SP | PP2),
    "TP2+SP x PP2+VP2": Layout(4, TP2_SP | PP2_VP2),
    "TP2+SP x CP2": Layout(4, TP2_SP | CP2),
    "TP2 x DP2": Layout(4, TP2, REPLICATED),
    "TP2 x DP2, distributed optimizer, overlapped": Layout(4, TP2, OVERLAPPED),
    "PP4": Layout(4, PP4),
    "PP2 x CP2": Layout(4, PP2 | CP2),
    "PP2+VP2 x DP2, distributed optimizer, overlapped": Layout(4, PP2_VP2, OVERLAPPED),
    "PP2+VP2 x DP2, distributed optimizer, aligned gather": Layout(
        4, PP2_VP2, OVERLAPPED | {"align_param_gather": True}
    ),
    "CP4, all-gather": Layout(4, CP2 | {"context_parallel_size": 4}),
    "CP4, all-to-all": Layout(4, CP2_EXCHANGE | {"context_parallel_size": 4}),
    "CP2 x DP2": Layout(4, CP2),
    "EP4": Layout(4, {"expert_model_parallel_size": 4}),
    "PP2 x EP2": Layout(4, PP2 | EP2),
    "PP2+VP2 x EP2": Layout(4, PP2_VP2 | EP2),
    "TP2+SP x DP2, EP2+ETP2": Layout(4, TP2_SP | EP2 | {"expert_tensor_parallel_size": 2}),
    "DP2, FSDP2": Layout(2, dist=FSDP2),
    "DP4, FSDP2": Layout(4, dist=FSDP2),
    "CP2, FSDP2": Layout(2, CP2, dist=FSDP2),
    "EP2, FSDP2": Layout(2, EP2, dist=FSDP2),
    "EP2 x DP4, FSDP2": Layout(4, EP2, dist=FSDP2),
    "TP2+SP x DP2, ETP1, FSDP2": Layout(4, TP2_SP | WHOLE_EXPERTS, dist=FSDP2),
    "TP2+SP x DP2, EP2, FSDP2": Layout(4, TP2_SP | EP2 | WHOLE_EXPERTS, dist=FSDP2),
    "TP2+SP x DP2, FSDP2": Layout(4, TP2_SP, dist=FSDP2),
    "DP2, FSDP2, full recomputation": Layout(2, FULL, dist=FSDP2),
    "PP2 x DP2, FSDP2": Layout(4, PP2, dist=FSDP2),
    "PP2+VP2 x DP2, FSDP2": Layout(4, PP2_VP2, dist=FSDP2),
    "PP2 x EP2, FSDP2": Layout(4, PP2 | EP2, dist=FSDP2),
    "DP2, Megatron-FSDP": Layout(2, {}, MEGATRON_FSDP),
    "DP2, Megatron-FSDP, gathered layer by layer": Layout(
        2, {}, MEGATRON_FSDP | {"suggested_communication_unit_size": 1, "bucket_size": 2000}
    ),
    "DP2, Megatron-FSDP of state": Layout(2, {}, STATE_CUT),
    "DP2, Megatron-FSDP of state and gradients": Layout(2, {}, GRADIENTS_CUT),
    "DP4, Megatron-FSDP": Layout(4, {}, MEGATRON_FSDP),
    "CP2, Megatron-FSDP": Layout(2, CP2, MEGATRON_FSDP),
    "CP2 x DP2, Megatron-FSDP": Layout(4, CP2, MEGATRON_FSDP),
    "TP2+SP x DP2, Megatron-FSDP": Layout(4, TP2_SP, MEGATRON_FSDP),
    "DP2, Megatron-FSDP, full recomputation": Layout(2, FULL, MEGATRON_FSDP),
    "PP2 x DP2, Megatron-FSDP": Layout(4, PP2, MEGATRON_FSDP),
    "PP2+VP2 x DP2, Megatron-FSDP": Layout(4, PP2_VP2, MEGATRON_FSDP),
    "PP2+VP2 x DP2, stages E, tt, t and tL, Megatron-FSDP": Layout(
        4, PP2_VP2 | {"pipeline_model_parallel_layout": "E|tt|t|tL"}, MEGATRON_FSDP
    ),
    "TP2+SP x PP2, Megatron-FSDP": Layout(4, TP2_SP | PP2, MEGATRON_FSDP),
    "EP2, Megatron-FSDP": Layout(2, EP2, MEGATRON_FSDP),
    "EP2 x DP4, Megatron-FSDP": Layout(4, EP2, MEGATRON_FSDP),
    "TP2+SP x DP2, ETP1, Megatron-FSDP": Layout(4, TP2_SP | WHOLE_EXPERTS, MEGATRON_FSDP),
    "PP2 x EP2, Megatron-FSDP": Layout(4, PP2 | EP2, MEGATRON_FSDP),
    "EP2 x DP4, Megatron-FSDP of state": Layout(4, EP2, STATE_CUT),
    "DP4, hybrid sharding": Layout(4, {}, {"num_distributed_optimizer_instances": 2}),
    "DP4, EP2+ETP2": Layout(4, EP2 | {"expert_tensor_parallel_size": 2}),
}

CELLS = {
    "dense": (
        "TP2",
        "TP2+SP",
        "TP2+SP, full recomputation",
        "PP2",
        "PP2, selective recomputation",
        "PP2, 1 layer in the first stage",
        "PP2, 1 layer in the last stage",
        "PP2, stages Ettt and tL",
        "PP2+VP2",
        "PP2+VP2, stages E, tt, t and tL",
        "PP2+VP3, embedding and loss count as layers",
        "CP2, all-gather",
        "CP2, all-to-all",
        "DP2",
        "DP2, distributed optimizer",
        "DP2, overlapped reduce",
        "DP2, distributed optimizer, overlapped reduce and gather",
        "TP2 x PP2",
        "TP2+SP x CP2",
        "TP2 x DP2",
        "TP2 x DP2, distributed optimizer, overlapped",
        "PP4",
        "PP2 x CP2",
        "PP2+VP2 x DP2, distributed optimizer, overlapped",
        "PP2+VP2 x DP2, distributed optimizer, aligned gather",
        "CP4, all-gather",
        "CP4, all-to-all",
        "DP4, hybrid sharding",
        "DP2, FSDP2",
        "DP4, FSDP2",
        "CP2, FSDP2",
        "TP2+SP x DP2, FSDP2",
        "DP2, FSDP2, full recomputation",
        "DP2, Megatron-FSDP",
        "DP2, Megatron-FSDP, gathered layer by layer",
        "DP2, Megatron-FSDP of state",
        "DP2, Megatron-FSDP of state and gradients",
        "DP4, Megatron-FSDP",
        "CP2, Megatron-FSDP",
        "CP2 x DP2, Megatron-FSDP",
        "TP2+SP x DP2, Megatron-FSDP",
        "DP2, Megatron-FSDP, full recomputation",
        "CP2, ring",
        "CP4, ring",
        "CP4, all-to-all within 2 and ring",
        "TP2+SP x CP2, ring",
        "CP2, kinds by layer",
        "PP2 x DP2, FSDP2",
        "PP2+VP2 x DP2, FSDP2",
        "PP2 x DP2, Megatron-FSDP",
        "PP2+VP2 x DP2, Megatron-FSDP",
        "PP2+VP2 x DP2, stages E, tt, t and tL, Megatron-FSDP",
        "TP2+SP x PP2, Megatron-FSDP",
    ),
    "dense, tied embeddings": (
        "TP2",
        "TP2+SP",
        "PP2",
        "PP2, 1 layer in the first stage",
        "PP2+VP2",
        "CP2, all-gather",
        "DP2, distributed optimizer",
        "TP2+SP x PP2",
        "PP4",
        "PP2+VP2 x DP2, distributed optimizer, overlapped",
        "DP2, Megatron-FSDP",
        "DP2, Megatron-FSDP of state",
        "TP2+SP x DP2, Megatron-FSDP",
        "PP2 x DP2, FSDP2",
        "PP2+VP2 x DP2, FSDP2",
    ),
    "dense, means of microbatches": (
        "TP2+SP",
        "PP2",
        "CP2, all-gather",
        "DP2, average in collective",
        "CP2 x DP2",
        "DP2, Megatron-FSDP",
        "DP2, Megatron-FSDP of state",
    ),
    "dense, 3 layers": ("PP2, embedding counts as a layer", "PP2, loss counts as a layer"),
    "experts": (
        "EP2, FSDP2",
        "EP2 x DP4, FSDP2",
        "TP2+SP x DP2, ETP1, FSDP2",
        "TP2+SP x DP2, EP2, FSDP2",
        "DP2, FSDP2",
        "DP2, Megatron-FSDP",
        "TP2+SP x DP2, FSDP2",
        "TP2+SP",
        "TP2+SP x EP2, ETP1",
        "PP2",
        "PP2, 1 layer in the first stage",
        "PP2+VP2",
        "CP2, all-gather",
        "CP2, all-to-all",
        "CP2 x EP2",
        "DP2, distributed optimizer",
        "EP2",
        "EP2, tokens by all-gather",
        "TP2+SP x PP2",
        "TP2+SP x CP2",
        "PP4",
        "EP4",
        "PP2 x EP2",
        "PP2+VP2 x EP2",
        "TP2+SP x DP2, EP2+ETP2",
        "DP4, EP2+ETP2",
        "CP2, ring",
        "PP2 x EP2, FSDP2",
        "EP2, Megatron-FSDP",
        "EP2 x DP4, Megatron-FSDP",
        "EP2 x DP4, Megatron-FSDP of state",
        "TP2+SP x DP2, ETP1, Megatron-FSDP",
        "PP2 x EP2, Megatron-FSDP",
    ),
    "experts, means of microbatches": ("TP2+SP", "PP2", "CP2, all-gather", "EP2"),
    "norms of heads": ("TP2", "TP2+SP", "CP2, all-gather", "TP2+SP x DP2, Megatron-FSDP"),
    "norms across heads": ("TP2", "TP2+SP", "CP2, all-gather"),
    "latent attention": ("TP2", "TP2+SP", "CP2, all-gather", "CP2, ring", "DP2, Megatron-FSDP"),
    "latent attention, experts, 1 further token": (
        "DP2, FSDP2",
        "DP2, Megatron-FSDP",
        "TP2+SP",
        "TP2+SP x EP2, ETP1",
        "PP2",
        "PP2+VP2",
        "CP2, all-gather",
        "CP2, all-to-all",
        "DP2, distributed optimizer",
        "EP2",
        "TP2+SP x PP2",
        "PP2 x CP2",
        "PP2 x EP2",
        "TP2+SP x DP2, EP2+ETP2",
        "CP2, ring",
    ),
    "2 further tokens": (
        "DP2, FSDP2",
        "DP2, Megatron-FSDP",
        "TP2",
        "TP2+SP",
        "PP2",
        "PP2, stages Ettt and tmmL",
        "PP2+VP2",
        "CP2, all-gather",
        "CP2, all-to-all",
        "DP2, distributed optimizer",
        "TP2+SP x CP2",
        "CP4, all-gather",
        "PP2+VP2 x DP2, distributed optimizer, overlapped",
        "CP2, ring",
        "PP2 x DP2, FSDP2",
    ),
    "2 further tokens, tied embeddings": ("TP2+SP", "PP2", "PP2+VP2", "CP2, all-gather"),
    "2 further tokens, means of microbatches": (
        "PP2",
        "CP2, all-gather",
        "DP2, distributed optimizer",
    ),
    "packed": (
        "TP2",
        "TP2+SP",
        "PP2",
        "PP2+VP2",
        "CP2, all-gather",
        "CP2, all-to-all",
        "DP2, distributed optimizer",
        "TP2+SP x CP2",
        "PP4",
        "PP2 x CP2",
        "PP2+VP2 x DP2, distributed optimizer, overlapped",
        "DP2, Megatron-FSDP",
        "CP2, ring",
        "PP2 x DP2, FSDP2",
    ),
    "padding-free": (
        "TP2",
        "TP2+SP",
        "PP2",
        "PP2+VP2",
        "CP2, all-gather",
        "CP2, all-to-all",
        "DP2, distributed optimizer",
        "TP2+SP x PP2+VP2",
        "PP4",
        "PP2 x CP2",
        "DP2, Megatron-FSDP",
        "CP2, ring",
        "CP4, all-to-all within 2 and ring",
    ),
    "packed, 2 further tokens": ("TP2+SP", "PP2+VP2", "CP2, all-gather"),
    "packed, experts": (
        "DP2, FSDP2",
        "DP2, Megatron-FSDP",
        "TP2+SP",
        "PP2+VP2",
        "CP2, all-gather",
        "EP2",
    ),
    "dropout of hidden states": ("TP2", "TP2, full recomputation"),
}


def cells():
    """All (name of a model, name of a layout)."""
    return [(model, layout) for model, layouts in CELLS.items() for layout in layouts]


# With a usual epsilon Adam's steps do not depend on the size of a gradient: one that is twice too large would not
# show, but the rounding of those of rare words would.
EPSILON = 1e-2


def run_cell(model, layout, folder, steps=STEPS, precision="fp32", lr=1e-2, clip_grad=0.5):
    """The record of this rank; ``layout`` is None for the single process, ``folder`` that of the samples."""
    chosen, spread = MODELS[model], LAYOUTS[layout] if layout else Layout(1)
    return run_toy(
        {
            "model": chosen.fields | spread.model,
            "ddp": DistributedDataParallelConfig(**spread.ddp),
            "dist": DistributedInitConfig(**spread.dist),
            "optimizer": OptimizerConfig(
                lr=lr, weight_decay=0.1, clip_grad=clip_grad, adam_eps=EPSILON
            ),
            "mixed_precision": precision,
        }
        | _samples(chosen.data, folder, steps)
    )


def _samples(kind, folder, steps):
    if kind == "mock":
        return {
            "train": {"train_iters": steps},
            "validation": ValidationConfig(eval_interval=steps // 2, eval_iters=1),
        }
    packed = kind == "packed"
    return {
        # where a row holds several samples, what fits into it depends on what they are filled up to
        "dataset": dataset(folder, kind, multiple=4 if packed else None),
        "train": {
            "train_iters": steps,
            "micro_batch_size": 1 if packed else 2,
            "global_batch_size": 4 if packed else 8,
        },
        "validation": ValidationConfig(),
    }


class Singles:
    """The records of single-process runs, each made once."""

    def __init__(self, folder):
        torch.set_num_threads(1)
        self._folder, self._records = folder, {}

    def __call__(self, model, **options):
        key = (model, tuple(options.items()))
        if key not in self._records:
            self._records[key] = run_cell(model, None, self._folder, **options)
            forget_model_parallel()
        return self._records[key]

    def close(self):
        """End the group of one process."""
        leave()


def measure(pool, singles, model, layout, folder, **options):
    """The figures of a cell; an ``AssertionError`` if what is compared is not the same."""
    records = pool.run(functools.partial(run_cell, **options), model, layout, folder)
    return compare(records, singles(model, **options))


def compare(records, reference):
    """How far the records of all ranks are from that of the single process."""
    first, expected_further = records[0], reference.further
    assert all(other.numbers == first.numbers for other in records), (
        "ranks report different numbers"
    )
    assert len(first.losses) == len(reference.losses) > 0
    weights, expected = whole_weights(records), whole_weights([reference])
    assert weights.keys() == expected.keys()
    assert first.further.keys() == expected_further.keys()
    return Figures(
        losses=_relative(first.losses, reference.losses),
        held_out=_relative(first.held_out, reference.held_out),
        further=max(
            (_relative(found, reference.further[name]) for name, found in first.further.items()),
            default=0.0,
        ),
        grad_norms=_relative(first.grad_norms, reference.grad_norms),
        weights=max(float((weights[name] - expected[name]).abs().max()) for name in weights),
    )


def moved(record):
    """How far the weights of a single-process run, by name, are from where they started."""
    final = whole_weights([record])
    return {
        name: float((weight - first_weight(name, weight.shape)).abs().max())
        for name, weight in final.items()
    }


def _relative(values, expected):
    return max(
        (abs(value / wanted - 1) for value, wanted in zip(values, expected, strict=True)),
        default=0.0,
    )
