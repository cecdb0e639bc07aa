# SPDX-License-Identifier: Apache-2.0
"""A run shrunk to toy size: the same family, features and parallel dimensions, in up to 8 processes."""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

MOST_RANKS = 8
SEQUENCE = 64
WIDTH = 64
HEAD = 16
VOCABULARY = 512

_DIMENSIONS = ("tensor", "pipeline", "expert", "context", "data")
_BLOCKS = "block_configs"
_LISTS = ("moe_layer_freq", "window_attn_skip_freq", "no_rope_freq", "linear_attention_freq", _BLOCKS)
_HYBRID = "hybrid_override_pattern"
_STAGE = "|"


@dataclass(frozen=True)
class Layout:
    """Parallel sizes; ``expert_tensor`` cuts each expert."""

    tensor: int
    pipeline: int
    context: int
    data: int
    expert: int
    expert_tensor: int

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def is_possible(self) -> bool:
        """Whether experts come out even."""
        return self.tensor * self.context * self.data % (self.expert * self.expert_tensor) == 0

    def __str__(self) -> str:
        sizes = [f"{name} {getattr(self, name)}" for name in _DIMENSIONS if getattr(self, name) > 1]
        return " x ".join(sizes) or "one process"


@dataclass
class Toy:
    """What is run instead.

    Attributes:
        config: The shrunk config; not validated.
        layout: Its parallel sizes.
        original: Those of the config that was shrunk.
        changes: A sentence for each thing that the toy does not have.
    """

    config: "ConfigContainer"
    layout: Layout
    original: Layout
    changes: list[str] = field(default_factory=list)


def shrink(config: "ConfigContainer", world_size: int, steps: int) -> Toy:
    """The toy of a config that was validated for ``world_size`` processes.

    Args:
        config: Left as it is.
        world_size: Processes of the real run.
        steps: Half of the toy's.
    """
    original = layout_of(config, world_size)
    toy = Toy(copy.deepcopy(config), smaller(original), original)
    toy.changes += _lost(toy)
    _layout(toy)
    _widths(toy.config.model, toy.layout)
    _layers(toy.config.model)
    _numbers(toy)
    _schedule(toy, steps)
    return toy


def layout_of(config: "ConfigContainer", world_size: int) -> Layout:
    """The parallel sizes of ``config``."""
    model = config.model
    return Layout(
        tensor=model.tensor_model_parallel_size,
        pipeline=model.pipeline_model_parallel_size,
        context=model.context_parallel_size,
        data=config.data_parallel_size(world_size),
        expert=model.expert_model_parallel_size,
        expert_tensor=model.expert_tensor_parallel_size or model.tensor_model_parallel_size,
    )


def smaller(layout: Layout) -> Layout:
    """At most 8 ranks that keep as many dimensions above one as possible, of these the fewest.

    Example:
        >>> smaller(Layout(tensor=8, pipeline=4, context=1, data=16, expert=1, expert_tensor=8))
        Layout(tensor=2, pipeline=2, context=1, data=2, expert=1, expert_tensor=2)
    """
    if layout.ranks <= MOST_RANKS:
        return layout
    kept: list[Layout] = []
    for tensor, pipeline, context, data, expert in itertools.product(
        *(_choices(size) for size in (layout.tensor, layout.pipeline, layout.context, layout.data, layout.expert))
    ):
        cut = tensor if layout.expert_tensor == layout.tensor else min(layout.expert_tensor, 2)
        kept.append(Layout(tensor, pipeline, context, data, expert, cut))
    possible = [choice for choice in kept if choice.ranks <= MOST_RANKS and choice.is_possible]
    return max(possible, key=lambda choice: (_worth(choice), -choice.ranks))


def _choices(size: int) -> tuple[int, ...]:
    return (1,) if size == 1 else (1, 2)


def _worth(layout: Layout) -> int:
    """Earlier dimensions are worth a little more: more can go wrong with them."""
    weights = zip(_DIMENSIONS, (10, 9, 9, 8, 7), strict=True)
    return sum(weight for name, weight in weights if getattr(layout, name) > 1)


def _lost(toy: Toy) -> list[str]:
    sizes = [(name, getattr(toy.original, name), getattr(toy.layout, name)) for name in _DIMENSIONS]
    smaller_ones = [f"{name} {before} -> {after}" for name, before, after in sizes if before != after > 1]
    gone = [f"{name} {before}" for name, before, after in sizes if before > 1 == after]
    sentences = [f"parallel sizes: {', '.join(smaller_ones)}"] if smaller_ones else []
    many = "is" if len(gone) == 1 else "are"
    return sentences + ([f"{' and '.join(gone)} {many} not rehearsed: 8 processes have no room"] if gone else [])


def _layout(toy: Toy) -> None:
    model, layout = toy.config.model, toy.layout
    model.tensor_model_parallel_size = layout.tensor
    model.pipeline_model_parallel_size = layout.pipeline
    model.context_parallel_size = layout.context
    model.expert_model_parallel_size = layout.expert
    if model.expert_tensor_parallel_size is not None:
        model.expert_tensor_parallel_size = layout.expert_tensor
    virtual = model.virtual_pipeline_model_parallel_size
    model.virtual_pipeline_model_parallel_size = virtual and (min(virtual, 2) if layout.pipeline > 1 else None)
    model.sequence_parallel = model.sequence_parallel and layout.tensor > 1
    model.microbatch_group_size_per_vp_stage = None
    model.hierarchical_context_parallel_sizes = None
    if layout.pipeline == 1:
        model.overlap_p2p_comm = False


# --------------------------------------------------------------------------------------------------------- widths


def _widths(model: Any, layout: Layout) -> None:
    groups = model.num_query_groups or model.num_attention_heads
    padded = model.make_query_groups_divisible_by > 1
    each = model.num_attention_heads // groups
    heads = 8 if not padded else 3 * each
    kept = {1: 1, model.num_attention_heads: heads}.get(groups, 4)
    width = WIDTH if WIDTH % heads == 0 else heads * HEAD  # transformers wants a multiple
    # transformers' norm over all heads is as wide as the hidden state
    head = width // heads if model.qk_norm_across_heads else HEAD
    keeps_heads = model.multi_latent_attention or _has_factors_by_frequency(model)
    values: dict[str, Any] = {
        "hidden_size": width,
        "ffn_hidden_size": model.ffn_hidden_size and 2 * width,
        "num_attention_heads": heads,
        "num_query_groups": model.num_query_groups and (3 if padded else kept),
        "kv_channels": model.kv_channels if keeps_heads else head,
        "make_query_groups_divisible_by": layout.tensor if padded else 1,
        "seq_length": SEQUENCE,
    }
    values |= (
        _of_experts(model, layout) | _of_latents(model) | _of_states(model, layout) | _of_blocks(model, heads)
    )
    for name, value in values.items():
        setattr(model, name, value)
    if model.window_size is not None:
        model.window_size = tuple(min(side, SEQUENCE // 4) for side in model.window_size)


def _has_factors_by_frequency(model: Any) -> bool:
    """As many as half a head is wide."""
    return any(isinstance(value, list) for value in (model.rope_parameters or {}).values())


def _of_experts(model: Any, layout: Layout) -> dict[str, Any]:
    if not model.num_moe_experts:
        return {}
    values: dict[str, Any] = {
        "num_moe_experts": max(4, 2 * layout.expert),
        "moe_router_topk": min(model.moe_router_topk, 2),
        "moe_ffn_hidden_size": WIDTH // 2,
    }
    if model.moe_shared_expert_intermediate_size:
        values["moe_shared_expert_intermediate_size"] = WIDTH // 2
    if model.moe_router_num_groups:
        values |= {"moe_router_num_groups": 2, "moe_router_group_topk": min(model.moe_router_group_topk or 2, 2)}
    return values


def _of_latents(model: Any) -> dict[str, Any]:
    if not model.multi_latent_attention:
        return {}
    sizes = {
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_head_dim": HEAD,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": HEAD,
    }
    return {name: size for name, size in sizes.items() if getattr(model, name)}


def _of_states(model: Any, layout: Layout) -> dict[str, Any]:
    """Mamba layers and delta nets: heads and groups that every rank gets some of."""
    ranks = layout.tensor * layout.context
    if hasattr(model, _HYBRID):
        groups = max(layout.tensor, min(model.mamba_num_groups, 2))
        return {
            "mamba_num_heads": max(8, 2 * ranks),
            "mamba_head_dim": 8,
            "mamba_state_dim": 16,
            "mamba_num_groups": groups,
            "mamba_chunk_size": 16,
        }
    if model.experimental_attention_variant is None:
        return {}
    return {
        "linear_num_key_heads": max(2, ranks),
        "linear_num_value_heads": 2 * max(2, ranks),
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }


def _of_blocks(model: Any, heads: int) -> dict[str, Any]:
    """Layers that are described one by one, the width of a feed-forward layer as a multiple of the hidden size."""
    if not hasattr(model, _BLOCKS):
        return {}
    sharing = {None: None, 1: 1, model.num_attention_heads: heads}  # query heads that share a key and a value

    def narrow(attention: dict[str, Any]) -> dict[str, Any]:
        return attention | {"n_heads_in_group": sharing.get(attention.get("n_heads_in_group"), 2)}

    return {_BLOCKS: [block | {"attention": narrow(block["attention"])} for block in model.block_configs]}


# --------------------------------------------------------------------------------------------------------- layers


def _layers(model: Any) -> None:
    """A few layers, of every kind that the model has, shared out as unevenly as they were."""
    stages = model.pipeline_model_parallel_size * (model.virtual_pipeline_model_parallel_size or 1)
    pattern = getattr(model, _HYBRID, None)
    kinds = _kinds(model)
    count = stages * -(-max(2, len(set(kinds))) // stages)
    count += _uneven(model, stages, count)
    chosen = sample(kinds, count)
    for name in _LISTS:
        value = getattr(model, name, None)
        if isinstance(value, list):
            setattr(model, name, [value[layer] for layer in chosen])
    if pattern:
        symbols = "".join(pattern.replace(_STAGE, "")[layer] for layer in chosen)
        each = count // stages
        parts = [symbols[start : start + each] for start in range(0, count, each)]
        setattr(model, _HYBRID, (_STAGE if _STAGE in pattern else "").join(parts))
    model.num_layers = count
    if model.mtp_num_layers:
        model.mtp_num_layers = 1
    if model.recompute_num_layers:
        model.recompute_num_layers = 1


def _kinds(model: Any) -> list[tuple[Any, ...]]:
    """What tells each layer from others."""
    columns: list[Sequence[Any]] = [
        [str(item) for item in value] for name in _LISTS if isinstance(value := getattr(model, name, None), list)
    ]
    for name in _LISTS:
        every = getattr(model, name, None)
        if isinstance(every, int) and not isinstance(every, bool) and every > 1:
            columns.append([layer % every == 0 for layer in range(model.num_layers)])
    pattern = getattr(model, _HYBRID, None)
    if pattern:
        columns.append(pattern.replace(_STAGE, ""))
    return list(zip(*columns, strict=True)) if columns else [()] * model.num_layers


def sample(kinds: Sequence[Any], count: int) -> list[int]:
    """``count`` layers in their order, the first of each kind among them; early ones again if there are too few.

    Example:
        >>> sample("AABAAB", 3)
        [0, 1, 2]
        >>> sample("AAAABB", 2)
        [0, 4]
    """
    chosen = sorted({kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values())[:count]
    rest = (layer for layer in itertools.cycle(range(len(kinds))) if len(kinds) < count or layer not in chosen)
    return sorted([*chosen, *itertools.islice(rest, count - len(chosen))])


def _uneven(model: Any, stages: int, count: int) -> int:
    """How many layers more or less make the toy as uneven as the model; its split is set."""
    virtual = model.virtual_pipeline_model_parallel_size or 1
    if model.pipeline_model_parallel_layout is not None:
        model.pipeline_model_parallel_layout = _layout_text(
            str(model.pipeline_model_parallel_layout), stages, count
        )
        return 0
    if stages == 1:
        model.num_layers_in_first_pipeline_stage = model.num_layers_in_last_pipeline_stage = None
        model.account_for_embedding_in_pipeline_split = model.account_for_loss_in_pipeline_split = False
        return 0
    counted = model.account_for_embedding_in_pipeline_split + model.account_for_loss_in_pipeline_split
    if counted:
        return stages - counted  # the ends count as layers
    each, ends = count // model.pipeline_model_parallel_size, 0
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        if getattr(model, name) is not None:
            setattr(model, name, each + virtual)
            ends += virtual
    return ends


def _layout_text(text: str, stages: int, count: int) -> str:
    """A layout with the embedding in the first, and the loss in the last of ``stages``."""
    middle = "t" * (count // stages)
    ahead = "m" if "m" in text else ""
    parts = [middle] * stages
    parts[0], parts[-1] = f"E{parts[0]}", f"{parts[-1]}{ahead}L"
    return _STAGE.join(parts)


# -------------------------------------------------------------------------------------------- precision, data, run


def _numbers(toy: Toy) -> None:
    """What needs hardware that is not asked for here."""
    from megatron.bridge.training.resolve import RECOMPUTED_BY_ENGINE

    config, model = toy.config, toy.config.model
    model.backend = "torch"
    model.tp_comm_overlap = False
    model.use_te_activation_func = False
    kinds = model.cp_comm_type if isinstance(model.cp_comm_type, list) else [model.cp_comm_type]
    if set(kinds) - {None, "a2a", "all_gather"}:
        toy.changes.append(f"model.cp_comm_type={model.cp_comm_type} needs Transformer Engine: all_gather is run")
        model.cp_comm_type = "all_gather"
    recomputed = [part for part in model.recompute_modules or () if part not in RECOMPUTED_BY_ENGINE]
    if model.recompute_modules and recomputed != list(model.recompute_modules):
        toy.changes.append(
            f"model.recompute_modules={model.recompute_modules}: of these, {recomputed or 'none'} "
            "can be recomputed without Transformer Engine"
        )
        model.recompute_modules = recomputed or ["core_attn"]
    if model.fp8 or model.fp4:
        toy.changes.append(f"mixed_precision={config.mixed_precision} needs a GPU: bf16_mixed is run")
        model.fp8 = model.fp4 = None
        model.first_last_layers_bf16 = False
        config.mixed_precision = "bf16_mixed"


def _schedule(toy: Toy, steps: int) -> None:
    config, layout = toy.config, toy.layout
    train, scheduler, dataset = config.train, config.scheduler, config.dataset
    microbatches = (
        2 * layout.pipeline if config.model.virtual_pipeline_model_parallel_size else max(2, layout.pipeline)
    )
    train.micro_batch_size = min(train.micro_batch_size, 2)
    train.global_batch_size = train.micro_batch_size * layout.data * microbatches
    train.train_iters = 2 * steps
    train.exit_interval = train.exit_duration_in_mins = None
    config.validation.eval_iters = min(config.validation.eval_iters, 1)
    config.validation.eval_interval = steps
    scheduler.lr_warmup_iters, scheduler.lr_decay_iters = 0, None
    scheduler.lr_wsd_decay_iters = scheduler.lr_wsd_decay_iters and 1
    for part in getattr(dataset, "datasets", [dataset]):
        part.seq_length = SEQUENCE
        specs = getattr(part, "packed_sequence_specs", None)
        if specs is not None and specs.packed_sequence_size > 0:
            specs.packed_sequence_size, specs.pad_seq_to_mult = SEQUENCE, None
        if getattr(part, "truncation", None) == "refuse":
            part.truncation = "right"  # samples are as long as the real run's
    dataset.seq_length = SEQUENCE
    if config.tokenizer.tokenizer_type == "NullTokenizer":
        config.model.vocab_size = config.tokenizer.vocab_size = VOCABULARY
    config.logger.log_interval, config.logger.tensorboard_dir, config.logger.log_dir = 1, None, None
    config.dist.distributed_backend = "gloo"
    config.logger.log_energy = False
    for name in ("ft", "nvrx_straggler", "inprocess_restart", "profiling"):  # of a launcher, of a longer run
        setattr(config, name, None)
