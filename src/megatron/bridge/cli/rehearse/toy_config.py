# SPDX-License-Identifier: Apache-2.0
"""Shrink a config to toy size: the same family, features and parallel dimensions, in up to 8 processes."""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron.bridge.backends.attention.torch_attention import RING_KINDS
from megatron.bridge.data.config import MockGPTDatasetConfig
from megatron.bridge.models.features.feature import ToySizes
from megatron.bridge.models.vision.audio import takes_audio
from megatron.bridge.training.config.resolve.requirements import RECOMPUTED_BY_ENGINE
from megatron.bridge.training.initialize.rank_state import sizes_of

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

MOST_RANKS = 8
SEQ_LENGTH = 64
HIDDEN_SIZE = 64
HEAD_DIM = 16
VOCAB_SIZE = 512

_DIMENSIONS = ("tensor", "pipeline", "expert", "context", "data")
_HYBRID_PATTERN = "hybrid_override_pattern"
_STAGE_SEPARATOR = "|"


@dataclass(frozen=True)
class ParallelDimensions:
    """The parallel sizes; ``expert_tensor`` shards each expert."""

    tensor: int
    pipeline: int
    context: int
    data: int
    expert: int
    expert_tensor: int

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def is_possible(self) -> bool:
        """Whether the expert sizes divide the number of ranks of a stage."""
        return self.tensor * self.context * self.data % (self.expert * self.expert_tensor) == 0

    def __str__(self) -> str:
        sizes = [f"{name} {getattr(self, name)}" for name in _DIMENSIONS if getattr(self, name) > 1]
        return " x ".join(sizes) or "one process"


@dataclass
class Toy:
    config: "ConfigContainer"  # the shrunk config, not resolved
    dimensions: ParallelDimensions
    original: ParallelDimensions
    changes: list[str] = field(
        default_factory=list
    )  # one message for each change that removes a feature


def shrink(config: "ConfigContainer", world_size: int, steps: int) -> Toy:
    """A smaller copy of a config that was resolved for ``world_size`` processes; it runs twice ``steps`` steps."""
    original = parallel_dimensions(config, world_size)
    toy = Toy(copy.deepcopy(config), shrink_dimensions(original), original)
    toy.changes += _describe_changes(toy)
    _set_parallelism(toy)
    _shrink_widths(toy.config.model, toy.dimensions)
    _shrink_layers(toy.config.model)
    if getattr(toy.config.model, "vision", None) is not None:
        _rehearse_without_images(toy)
    _remove_hardware_features(toy)
    _shorten(toy, steps)
    return toy


def _rehearse_without_images(toy: Toy) -> None:
    """A toy tower, which encodes a dummy image in each microbatch: the real processor needs files of the model."""
    model: Any = toy.config.model
    shrink_tower(model)
    toy.config.dataset = MockGPTDatasetConfig(seq_length=SEQ_LENGTH)
    toy.config.tokenizer.tokenizer_type, toy.config.tokenizer.tokenizer_model = (
        "NullTokenizer",
        None,
    )
    kind, dummy = ("images", "a dummy image")
    if takes_audio(model.vision):
        kind, dummy = ("audio", "silence")
    toy.changes.append(
        f"dataset: no {kind}, only text, and {dummy} in each microbatch for the tower"
    )


def parallel_dimensions(config: "ConfigContainer", world_size: int) -> ParallelDimensions:
    sizes = sizes_of(config.model)
    model_sizes = {
        name: sizes[name] for name in ("tensor", "pipeline", "context", "expert", "expert_tensor")
    }
    return ParallelDimensions(**model_sizes, data=config.data_parallel_size(world_size))


def shrink_dimensions(dimensions: ParallelDimensions) -> ParallelDimensions:
    """Shrink to at most 8 ranks, keeping as many dimensions above 1 as possible with as few ranks as possible.

    Example:
        >>> print(shrink_dimensions(ParallelDimensions(8, 4, context=1, data=16, expert=1, expert_tensor=8)))
        tensor 2 x pipeline 2 x data 2
    """
    if dimensions.ranks <= MOST_RANKS:
        return dimensions
    kept: list[ParallelDimensions] = []
    choices = [range(1, min(getattr(dimensions, name), 2) + 1) for name in _DIMENSIONS]
    for tensor, pipeline, expert, context, data in itertools.product(*choices):
        cut = (
            tensor
            if dimensions.expert_tensor == dimensions.tensor
            else min(dimensions.expert_tensor, 2)
        )
        kept.append(ParallelDimensions(tensor, pipeline, context, data, expert, cut))
    possible = [choice for choice in kept if choice.ranks <= MOST_RANKS and choice.is_possible]
    return max(possible, key=lambda choice: (_score(choice), -choice.ranks))


def _score(dimensions: ParallelDimensions) -> int:
    """The number of dimensions above 1; the first ones weigh slightly more, as they are more error-prone."""
    weights = zip(_DIMENSIONS, (10, 9, 9, 8, 7), strict=True)
    return sum(weight for name, weight in weights if getattr(dimensions, name) > 1)


def _describe_changes(toy: Toy) -> list[str]:
    sizes = [
        (name, getattr(toy.original, name), getattr(toy.dimensions, name)) for name in _DIMENSIONS
    ]
    smaller_ones = [
        f"{name} {before} -> {after}" for name, before, after in sizes if before != after > 1
    ]
    gone = [f"{name} {before}" for name, before, after in sizes if before > 1 == after]
    sentences = [f"parallel sizes: {', '.join(smaller_ones)}"] if smaller_ones else []
    many = "is" if len(gone) == 1 else "are"
    return sentences + (
        [f"{' and '.join(gone)} {many} not rehearsed: 8 processes are too few"] if gone else []
    )


def _set_parallelism(toy: Toy) -> None:
    model = toy.config.model
    dimensions = toy.dimensions
    model.tensor_model_parallel_size = dimensions.tensor
    model.pipeline_model_parallel_size = dimensions.pipeline
    model.context_parallel_size = dimensions.context
    model.expert_model_parallel_size = dimensions.expert
    if model.expert_tensor_parallel_size is not None:
        model.expert_tensor_parallel_size = dimensions.expert_tensor
    virtual = model.virtual_pipeline_model_parallel_size
    model.virtual_pipeline_model_parallel_size = virtual and (
        min(virtual, 2) if dimensions.pipeline > 1 else None
    )
    model.sequence_parallel = model.sequence_parallel and dimensions.tensor > 1
    model.microbatch_group_size_per_vp_stage = None
    if model.hierarchical_context_parallel_sizes:
        levels = [1, dimensions.context]
        model.hierarchical_context_parallel_sizes = levels if dimensions.context > 1 else None
    if dimensions.pipeline == 1:
        model.overlap_p2p_comm = False


def _shrink_widths(model: Any, dimensions: ParallelDimensions) -> None:
    groups = model.num_query_groups or model.num_attention_heads
    padded = model.make_query_groups_divisible_by > 1
    heads_per_group = model.num_attention_heads // groups
    heads = 8 if not padded else 3 * heads_per_group
    toy_groups = {1: 1, model.num_attention_heads: heads}.get(groups, 4)
    # a list of RoPE factors has half as many entries as the head size
    has_factors = any(isinstance(value, list) for value in (model.rope_parameters or {}).values())
    head = (
        model.kv_channels
        if model.multi_latent_attention or has_factors
        else model.kv_channels and HEAD_DIM
    )
    # some architectures in transformers have no setting for a head size other than the quotient
    quotient = model.hidden_size // model.num_attention_heads
    divides = not model.multi_latent_attention and model.kv_channels in (None, quotient)
    width = heads * (head or HEAD_DIM) if divides or HIDDEN_SIZE % heads else HIDDEN_SIZE
    toy = ToySizes(
        hidden_size=width,
        head_dim=HEAD_DIM,
        query_heads=heads,
        query_groups=toy_groups,
        vocab_size=VOCAB_SIZE,
        seq_length=SEQ_LENGTH,
        tensor=dimensions.tensor,
        context=dimensions.context,
    )
    values: dict[str, Any] = {
        "hidden_size": width,
        "ffn_hidden_size": model.ffn_hidden_size and 2 * width,
        "num_attention_heads": heads,
        "num_query_groups": model.num_query_groups and (3 if padded else toy_groups),
        "kv_channels": head,
        "make_query_groups_divisible_by": dimensions.tensor if padded else 1,
        "seq_length": SEQ_LENGTH,
        **_moe_sizes(model, dimensions),
        **model.toy_sizes(toy),
    }
    for name, value in values.items():
        setattr(model, name, value)
    if model.window_size is not None:
        model.window_size = tuple(min(side, SEQ_LENGTH // 4) for side in model.window_size)


def _moe_sizes(model: Any, dimensions: ParallelDimensions) -> dict[str, Any]:
    if not model.num_moe_experts:
        return {}
    values: dict[str, Any] = {
        "num_moe_experts": max(4, 2 * dimensions.expert),
        "moe_router_topk": min(model.moe_router_topk, 2),
        # must not be half the width: transformers transposes stacked experts depending on their shape
        "moe_ffn_hidden_size": HIDDEN_SIZE * 3 // 4,
    }
    if model.moe_shared_expert_intermediate_size:
        values["moe_shared_expert_intermediate_size"] = HIDDEN_SIZE * 3 // 4
    if model.moe_router_num_groups:
        values |= {
            "moe_router_num_groups": 2,
            "moe_router_group_topk": min(model.moe_router_group_topk or 2, 2),
        }
    return values


def _shrink_layers(model: Any) -> None:
    """Keep a few layers of every kind, distributed over stages as unevenly as in the original."""
    stages = model.pipeline_model_parallel_size * (model.virtual_pipeline_model_parallel_size or 1)
    pattern = getattr(model, _HYBRID_PATTERN, None)
    kinds = _layer_kinds(model)
    # the config of the architecture describes periodic kinds by their period, so the toy keeps whole periods
    periodic = model.has_periodic_layers
    fewest = max(kinds.index(kind) + 1 for kind in set(kinds)) if periodic else len(set(kinds))
    count = stages * -(-max(2, fewest) // stages)
    count += _uneven_layers(model, stages, count)
    chosen = (
        [layer % len(kinds) for layer in range(count)] if periodic else sample_layers(kinds, count)
    )
    for name in model.per_layer_fields:
        value = getattr(model, name, None)
        if isinstance(value, list):
            setattr(model, name, [value[layer] for layer in chosen])
    if pattern:
        symbols = "".join(pattern.replace(_STAGE_SEPARATOR, "")[layer] for layer in chosen)
        layers_per_stage = count // stages
        parts = [
            symbols[start : start + layers_per_stage] for start in range(0, count, layers_per_stage)
        ]
        setattr(
            model,
            _HYBRID_PATTERN,
            (_STAGE_SEPARATOR if _STAGE_SEPARATOR in pattern else "").join(parts),
        )
    model.num_layers = count
    if model.recompute_num_layers:
        model.recompute_num_layers = 1


def _layer_kinds(model: Any) -> list[tuple[Any, ...]]:
    """The properties in which the layers of a model differ, for each layer."""
    columns: list[Sequence[Any]] = [
        [str(item) for item in value]
        for name in model.per_layer_fields
        if isinstance(value := getattr(model, name, None), list)
    ]
    for name in model.per_layer_fields:
        every = getattr(model, name, None)
        if isinstance(every, int) and not isinstance(every, bool) and every > 1:
            columns.append([layer % every == 0 for layer in range(model.num_layers)])
    pattern = getattr(model, _HYBRID_PATTERN, None)
    if pattern:
        columns.append(pattern.replace(_STAGE_SEPARATOR, ""))
    return list(zip(*columns, strict=True)) if columns else [()] * model.num_layers


def sample_layers(kinds: Sequence[Any], count: int) -> list[int]:
    """Choose ``count`` layers in order, including the first of each kind; repeat early ones if there are too few.

    Example:
        >>> sample_layers("AABAAB", 3)
        [0, 1, 2]
        >>> sample_layers("AAAABB", 2)
        [0, 4]
    """
    chosen = sorted({kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values())[
        :count
    ]
    rest = (
        layer
        for layer in itertools.cycle(range(len(kinds)))
        if len(kinds) < count or layer not in chosen
    )
    return sorted([*chosen, *itertools.islice(rest, count - len(chosen))])


def _uneven_layers(model: Any, stages: int, count: int) -> int:
    """Set the pipeline split of the toy; return by how many layers its ends change the layer count."""
    virtual = model.virtual_pipeline_model_parallel_size or 1
    if model.pipeline_model_parallel_layout is not None:
        model.pipeline_model_parallel_layout = _pipeline_layout(
            str(model.pipeline_model_parallel_layout), stages, count
        )
        return 0
    if stages == 1:
        model.num_layers_in_first_pipeline_stage = model.num_layers_in_last_pipeline_stage = None
        model.account_for_embedding_in_pipeline_split = model.account_for_loss_in_pipeline_split = (
            False
        )
        return 0
    counted = (
        model.account_for_embedding_in_pipeline_split + model.account_for_loss_in_pipeline_split
    )
    if counted:
        return stages - counted  # embedding and loss count as layers
    layers_per_stage = count // model.pipeline_model_parallel_size
    ends = 0
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        if getattr(model, name) is not None:
            setattr(model, name, layers_per_stage + virtual)
            ends += virtual
    return ends


def _pipeline_layout(text: str, stages: int, count: int) -> str:
    """A pipeline layout with the embedding in the first of ``stages`` and the loss in the last."""
    middle = "t" * (count // stages)
    ahead = "m" if "m" in text else ""
    parts = [middle] * stages
    parts[0], parts[-1] = f"E{parts[0]}", f"{parts[-1]}{ahead}L"
    return _STAGE_SEPARATOR.join(parts)


def _remove_hardware_features(toy: Toy) -> None:
    config = toy.config
    model = toy.config.model
    model.backend = "torch"
    model.tp_comm_overlap = False
    model.use_te_activation_func = False
    kinds = model.cp_comm_type if isinstance(model.cp_comm_type, list) else [model.cp_comm_type]
    if set(kinds) & set(RING_KINDS) and model.attention_dropout > 0:
        toy.changes.append(
            f"model.cp_comm_type={model.cp_comm_type} with dropout needs Transformer Engine: using all_gather"
        )
        model.cp_comm_type = "all_gather"
        model.hierarchical_context_parallel_sizes = None
    recomputed = [
        part for part in model.recompute_modules or () if part not in RECOMPUTED_BY_ENGINE
    ]
    if model.recompute_modules and recomputed != list(model.recompute_modules):
        toy.changes.append(
            f"model.recompute_modules={model.recompute_modules}: of these, {recomputed or 'none'} "
            "can be recomputed without Transformer Engine"
        )
        model.recompute_modules = recomputed or ["core_attn"]
    if model.fp8 or model.fp4:
        toy.changes.append(
            f"mixed_precision={config.mixed_precision} needs a GPU: using bf16_mixed"
        )
        model.fp8 = model.fp4 = None
        model.first_last_layers_bf16 = False
        config.mixed_precision = "bf16_mixed"


def _shorten(toy: Toy, steps: int) -> None:
    config = toy.config
    dimensions = toy.dimensions
    train = config.train
    scheduler = config.scheduler
    dataset = config.dataset
    microbatches = (
        2 * dimensions.pipeline
        if config.model.virtual_pipeline_model_parallel_size
        else max(2, dimensions.pipeline)
    )
    train.micro_batch_size = min(train.micro_batch_size, 2)
    config.validation.eval_micro_batch_size = None
    config.validation.eval_global_batch_size = None
    config.validation.sets = {}
    train.global_batch_size = train.micro_batch_size * dimensions.data * microbatches
    train.train_iters = 2 * steps
    train.num_epochs = None
    train.exit_interval = train.exit_duration_in_mins = None
    config.validation.eval_iters = min(config.validation.eval_iters, 1)
    config.validation.eval_interval = steps
    scheduler.lr_warmup_iters = 0
    scheduler.lr_decay_iters = None
    scheduler.lr_wsd_decay_iters = scheduler.lr_wsd_decay_iters and 1
    for part in getattr(dataset, "datasets", [dataset]):
        part.seq_length = SEQ_LENGTH
        specs = getattr(part, "packed_sequence_specs", None)
        if specs is not None and specs.packed_sequence_size > 0:
            specs.packed_sequence_size = SEQ_LENGTH
            specs.pad_seq_to_mult = None
        if getattr(part, "truncation", None) == "refuse":
            part.truncation = "right"  # the samples are as long as in the real run
    dataset.seq_length = SEQ_LENGTH
    if config.model.hybrid_context_parallel:
        # some samples are shared by all ranks
        config.model.max_seqlen_per_dp_cp_rank = SEQ_LENGTH // dimensions.data
    if config.tokenizer.tokenizer_type == "NullTokenizer":
        config.model.vocab_size = config.tokenizer.vocab_size = VOCAB_SIZE
    config.logger.log_interval, config.logger.tensorboard_dir, config.logger.log_dir = 1, None, None
    config.dist.distributed_backend = "gloo"
    config.logger.log_energy = False
    for name in (
        "ft",
        "nvrx_straggler",
        "inprocess_restart",
        "profiling",
    ):  # need a launcher or more steps
        setattr(config, name, None)


TOWER_HEADS = 2
TOWER_WIDTH = 32
_LAYERS = {
    "depth": 2,
    "num_hidden_layers": 2,
    "num_heads": TOWER_HEADS,
    "num_attention_heads": TOWER_HEADS,
    "num_key_value_heads": TOWER_HEADS,
}
_WIDTHS = {
    "embed_dim": TOWER_WIDTH,
    "intermediate_size": 2 * TOWER_WIDTH,
    **dict.fromkeys(("mm_embed_dim", "output_proj_dims"), TOWER_WIDTH),
    **dict.fromkeys(("mm_posemb_size", "position_embedding_size"), 128),
}
_CHOSEN_LAYERS = {"deepstack_visual_indexes": [0], "fullatt_block_indexes": [1]}
_TOKENS_PER_SIDE = 2


def shrink_tower(model: Any) -> None:
    """Shrink ``model.vision`` and the settings that depend on the width of heads, after the decoder."""
    values = model.vision
    if takes_audio(values):
        _shrink_audio_tower(model)
        return
    tower = values["vision_config"]
    is_as_wide = "embed_dim" in tower  # Qwen2-VL's hidden_size is the decoder's
    widths = {**_WIDTHS, "hidden_size": model.hidden_size if is_as_wide else TOWER_WIDTH}
    widths |= {"out_hidden_size": model.hidden_size, **_LAYERS, **_CHOSEN_LAYERS}
    small = {
        **tower,
        **{name: value for name, value in widths.items() if tower.get(name) is not None},
    }
    model.vision = {
        **values,
        "vision_config": small,
        "text_config": _text_of_tower(model),
        **_image_sizes(values, small),
    }
    if model.mrope_section:
        model.mrope_section = _sections(
            model.mrope_section, int(model.kv_channels * model.rotary_percent) // 2
        )


_AUDIO_WIDTHS = {
    **dict.fromkeys(("hidden_size", "d_model"), TOWER_WIDTH),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 2 * TOWER_WIDTH),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads"), TOWER_HEADS),
    "num_mel_bins": 8,
    "max_source_positions": 16,
}


def _shrink_audio_tower(model: Any) -> None:
    tower = model.vision["audio_config"]
    small = {name: value for name, value in _AUDIO_WIDTHS.items() if name in tower}
    model.vision = {
        **model.vision,
        "audio_config": {**tower, **small},
        "text_config": _text_of_tower(model),
    }


def _text_of_tower(model: Any) -> dict[str, Any]:
    """What a tower reads of the config of its decoder, with the sizes of ``model``."""
    text = {**model.vision["text_config"], "hidden_size": model.hidden_size}
    text |= {
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
    }
    if "head_dim" in text:
        text["head_dim"] = model.kv_channels
    return text


def _image_sizes(values: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    """Set the smallest image of a tower with a fixed image size, and return the provider's settings for it."""
    if "image_size" not in tower or "spatial_merge_size" in tower:
        return {}
    side = values.get("scale_factor") or 2  # patches along a side of one token
    tower["image_size"] = tower["patch_size"] * side * _TOKENS_PER_SIDE
    return {"mm_tokens_per_image": _TOKENS_PER_SIDE**2} if "mm_tokens_per_image" in values else {}


def _sections(sections: list[int], total: int) -> list[int]:
    """Time, height and width in the same proportions, ``total`` frequencies.

    Example:
        >>> _sections([16, 24, 24], 8)
        [2, 3, 3]
    """
    original_total = sum(sections)
    first = [max(1, section * total // original_total) for section in sections[:-1]]
    return [*first, total - sum(first)]
