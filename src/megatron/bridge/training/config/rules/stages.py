# SPDX-License-Identifier: Apache-2.0
"""Rules on uneven pipeline stages."""

from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.bridge.models.heterogeneous_provider import HeterogeneousModelProvider
from megatron.bridge.models.vision.provider import VisionGPTModelProvider
from megatron.bridge.training.config.run_config import RunConfig

_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_LAYOUT = "pipeline_model_parallel_layout"
SPLIT = (*_ENDS, *_COUNTED, _LAYOUT)  # settings of the model that say which stage has which layers


def sent_outputs_can_be_freed(config: RunConfig, world_size: int) -> Iterator[str]:
    """What a stage sends must be a tensor that nothing else holds."""
    model = config.model
    shared = isinstance(model, HeterogeneousModelProvider | VisionGPTModelProvider)
    if shared and model.deallocate_pipeline_outputs and model.pipeline_model_parallel_size > 1:
        yield (
            f"model.deallocate_pipeline_outputs=True with a {type(model).__name__}: the backward pass may read "
            f"what a stage has sent, set it to False"
        )


def stage_sizes_are_given_once(config: RunConfig, world_size: int) -> Iterator[str]:
    """Stage sizes come from the first and last stage, from the accounted layers, or from a layout."""
    ways = [
        chosen for names in (_ENDS, _COUNTED, (_LAYOUT,)) if (chosen := given(config.model, names))
    ]
    if len(ways) > 1:
        yield f"{' and '.join(map(_words, ways))} set the same stage sizes: keep one"


def middle_stages_are_even(config: RunConfig, world_size: int) -> Iterator[str]:
    """The stages in the middle are equal, and split evenly into virtual stages."""
    model = config.model
    chosen = given(model, _ENDS)
    chunks = model.virtual_pipeline_model_parallel_size or 1
    if not chosen or model.pipeline_model_parallel_size == 1:
        return
    unit = (
        f"multiples of model.virtual_pipeline_model_parallel_size={chunks}"
        if chunks > 1
        else "1 or more"
    )
    wrong = [f"model.{name}={size}" for name, size in chosen.items() if size < 1 or size % chunks]
    if wrong:
        yield f"{' and '.join(wrong)}: a stage has {unit} layers"
        return
    left = model.num_layers - sum(chosen.values())
    stages = model.pipeline_model_parallel_size - len(chosen)
    if left != 0 if stages == 0 else left <= 0 or left % (stages * chunks):
        cut = f" x {chunks} virtual ones" if chunks > 1 else ""
        rule = f"a multiple of {stages * chunks}" if stages else "0"
        yield (
            f"{_words(chosen)} of model.num_layers={model.num_layers} leaves {left} layers for the {stages} other "
            f"stages{cut}: it must be {rule}"
        )


def accounted_layers_divide_stages(config: RunConfig, world_size: int) -> Iterator[str]:
    """With the embedding or the loss counted as a layer, stages are equal."""
    model = config.model
    chosen = given(model, _COUNTED)
    virtual = model.virtual_pipeline_model_parallel_size
    stages = model.pipeline_model_parallel_size * (virtual or 1)
    layers = model.num_layers + len(chosen)
    if chosen and layers % stages:
        below = layers // stages * stages - len(chosen)
        nearest = " or ".join(str(count) for count in (below, below + stages) if count > 0)
        yield (
            f"{_words(chosen)} makes {layers} of model.num_layers={model.num_layers}, which {stages} stages"
            f"{', virtual ones counted,' if virtual else ''} do not divide: use {nearest} layers, or another split"
        )


def pipeline_layout_has_every_layer(config: RunConfig, world_size: int) -> Iterator[str]:
    """The layout lists the embedding, all layers, MTP layers and the loss, in this order, on every stage."""
    model = config.model
    if model.pipeline_model_parallel_layout is None or model.pipeline_model_parallel_size == 1:
        return
    setting = f"model.{_LAYOUT}={model.pipeline_model_parallel_layout}"
    try:
        stages = _stages(model.pipeline_model_parallel_layout)
    except (AssertionError, KeyError) as error:
        yield f"{setting} cannot be read ({error}): E is the embedding, t a layer, m an MTP layer, L the loss"
        return
    expected = [
        "embedding",
        *["decoder"] * model.num_layers,
        *["mtp"] * (model.mtp_num_layers or 0),
        "loss",
    ]
    if [layer for stage in stages for layer in stage] != expected:
        letters = f"{model.num_layers} layers (t)"
        letters += f", {model.mtp_num_layers} MTP layers (m)" if model.mtp_num_layers else ""
        yield f"{setting} must hold the embedding (E), {letters} and the loss (L), in this order"
    else:
        yield from _virtual_size(setting, len(stages), model)


def _virtual_size(setting: str, stages: int, model: Any) -> Iterator[str]:
    size = model.pipeline_model_parallel_size
    virtual = model.virtual_pipeline_model_parallel_size or 1
    if stages % size:
        yield f"{setting} has {stages} stages, no multiple of model.pipeline_model_parallel_size={size}"
    elif stages != size * virtual:
        fitting = stages // size if stages > size else "null"
        yield (
            f"{setting} has {stages} stages for model.pipeline_model_parallel_size={size}: set "
            f"model.virtual_pipeline_model_parallel_size={fitting}"
        )


def _stages(layout: Any) -> list[list[str]]:
    """The layer types of each stage, with virtual stages listed separately."""
    if isinstance(layout, str):
        layout = PipelineParallelLayerLayout.parse_str_to_list(layout)
    elif isinstance(layout, PipelineParallelLayerLayout):
        return _stages(layout.input_data)
    return [
        [
            LayerType[layer.strip().lower()].name if isinstance(layer, str) else layer.name
            for layer in stage
        ]
        for stage in layout
    ]


def given(model: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Those of the settings ``names`` that are set, and not off."""
    values = {name: getattr(model, name) for name in names}
    return {
        name: value for name, value in values.items() if value is not None and value is not False
    }


def _words(chosen: dict[str, Any]) -> str:
    return " and ".join(f"model.{name}={value}" for name, value in chosen.items())
