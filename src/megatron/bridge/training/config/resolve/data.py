# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning data: padding that follows the layout, and settings of the model that follow data and weights."""

from collections.abc import Sequence
from contextlib import suppress

from megatron.bridge.checkpoint import model_io
from megatron.bridge.data.config import (
    BlendedDatasetConfig,
    ClassificationDatasetConfig,
    DatasetConfig,
    EmbeddingDatasetConfig,
    PackedSequenceSpecs,
    PreferenceDatasetConfig,
    PromptDatasetConfig,
    RecordDatasetConfig,
    RerankDatasetConfig,
    TokenClassificationDatasetConfig,
)
from megatron.bridge.data.energon import EnergonProvider
from megatron.bridge.data.media.media_rules import has_processor
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.features.multi_token_prediction import drop_mtp_layers
from megatron.bridge.models.hf_pretrained.hub import is_megatron, on_this_machine
from megatron.bridge.training.config.resolve.findings import Findings
from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils.errors import UserError


def derive_data(config: RunConfig, world_size: int, findings: Findings) -> None:
    if isinstance(config.dataset, EnergonProvider) and config.dataset.readers is None:
        config.dataset.readers = config.data_parallel_size(world_size)
    parts = tuning_parts(config.dataset)
    for part in parts:
        _pad_for_layout(part, config)
        # images are processed as the model's own processor does it, which is next to its tokenizer
        path = config.tokenizer.tokenizer_model
        if part.hf_processor_path is None and has_tower(config) and path and has_processor(path):
            part.hf_processor_path = path
        _continue_template(part, config)
        _count_classes(part, config)
        if isinstance(part, PreferenceDatasetConfig) and part.labeled is None:
            part.labeled = config.dpo is not None and config.dpo.loss_type == "kto"
        _leave_room_for_completions(part, config)
    findings.notes += [
        *_count_tokens(config, parts),
        *_vary_lengths(config),
        *_balance_rows(config, parts),
    ]


def tuning_parts(dataset: DatasetConfig) -> Sequence[RecordDatasetConfig]:
    """The record datasets in ``dataset``; none if it is of another kind."""
    if isinstance(dataset, BlendedDatasetConfig):
        return dataset.datasets
    return [dataset] if isinstance(dataset, RecordDatasetConfig) else []


def validation_sets(config: RunConfig) -> dict[str, DatasetConfig]:
    """Return the dataset of each set of ``validation.sets`` by its name."""
    return {
        name: config.dataset if source is None else config.dataset.held_out_from(source)
        for name, source in config.validation.sets.items()
    }


def _continue_template(part: RecordDatasetConfig, config: RunConfig) -> None:
    """Render conversations as the run did that trained the weights from which this one starts.

    A run that resumes goes on with its own template, also if it was started from weights that are gone.
    """
    checkpoint = config.checkpoint
    for start in (checkpoint.save, checkpoint.load, checkpoint.pretrained_checkpoint):
        if part.chat_template is None and start is not None and is_megatron(start):
            with suppress(UserError):  # the start is checked, and its problems are named, elsewhere
                part.chat_template = model_io.trained_template(start)


def sequence_multiple(config: RunConfig, padding_free: bool) -> int:
    """The divisor of all sample lengths: context parallelism splits samples, and sequence parallelism rows."""
    model = config.model
    multiple = 2 * model.context_parallel_size if model.context_parallel_size > 1 else 1
    # a packed row is as long as seq_length, and a rule checks that seq_length can be split
    return (
        multiple * model.tensor_model_parallel_size
        if padding_free and model.sequence_parallel
        else multiple
    )


def _pad_for_layout(part: RecordDatasetConfig, config: RunConfig) -> None:
    if not part.joins_samples:
        return
    if part.packed_sequence_specs is None:
        part.packed_sequence_specs = PackedSequenceSpecs()
    if part.packed_sequence_specs.pad_seq_to_mult is None:
        part.packed_sequence_specs.pad_seq_to_mult = sequence_multiple(config, part.padding_free)


def has_tower(config: RunConfig) -> bool:
    return getattr(config.model, "vision", None) is not None


def _count_classes(part: RecordDatasetConfig, config: RunConfig) -> None:
    if isinstance(part, EmbeddingDatasetConfig | RerankDatasetConfig):
        config.model.hard_negatives = config.model.hard_negatives or part.negatives
    if not isinstance(part, ClassificationDatasetConfig | TokenClassificationDatasetConfig):
        return
    if part.num_labels is None:
        part.num_labels = config.model.num_labels
    if config.model.head is not None and config.model.label_names is None:
        config.model.label_names = part.label_names


def _leave_room_for_completions(part: RecordDatasetConfig, config: RunConfig) -> None:
    grpo = config.grpo
    if not isinstance(part, PromptDatasetConfig) or grpo is None:
        return
    if part.max_prompt_length is None:
        part.max_prompt_length = max(1, part.seq_length - grpo.max_completion_length)
    if part.completions_per_epoch is None:
        part.completions_per_epoch = grpo.num_generations * grpo.num_iterations


def _count_tokens(config: RunConfig, parts: Sequence[RecordDatasetConfig]) -> list[str]:
    """Samples differ in trained tokens, so a mean of means would depend on which of them share a microbatch."""
    if not parts or config.model.calculate_per_token_loss:
        return []
    config.model.calculate_per_token_loss = True
    return [
        "model.calculate_per_token_loss=True is used: each trained token counts the same, whatever it is batched "
        "or packed with"
    ]


def _balance_rows(config: RunConfig, parts: Sequence[RecordDatasetConfig]) -> list[str]:
    """``seq_aux_loss`` balances the experts of each row, which is one sample only where rows are padded."""
    kinds = config.model.moe_router_load_balancing_type
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not config.model.num_moe_experts or "seq_aux_loss" not in kinds:
        return []
    for part in parts:
        specs = part.packed_sequence_specs
        if part.padding_free or (specs is not None and specs.packed_sequence_size > 0):
            return [
                "model.moe_router_load_balancing_type=seq_aux_loss balances the experts of each row, and the rows "
                "of this run hold several samples: a row counts as one sequence"
            ]
    return []


def _vary_lengths(config: RunConfig) -> list[str]:
    model = config.model
    distill = config.distill
    if model.pipeline_model_parallel_size == 1 or model.variable_seq_lengths:
        return []
    if model.hybrid_context_parallel:
        why = "microbatches of shared samples differ in length"
    elif getattr(config.dataset, "padding_free", False):
        why = "padding-free batches differ in length"
    elif (
        distill is not None and distill.cache is None
    ):  # a reference goes with padding-free batches
        why = "stages send the teacher's activations along with the student's"
    else:
        return []
    model.variable_seq_lengths = True
    if (
        not model.num_moe_experts
    ):  # Megatron-Core asks for this one even where there is nothing to dispatch
        model.moe_token_dispatcher_type = "alltoall"
    return [f"model.variable_seq_lengths=True is used: {why}"]


def derive_mtp_layers(config: RunConfig, findings: Findings) -> None:
    """Drop the layers of multi-token prediction where the weights have none, whatever their config declares.

    transformers drops them when it saves a model. A recipe's number is overridden; one that the user typed is refused
    later.
    """
    start = config.checkpoint.pretrained_checkpoint
    folder = on_this_machine(start) if config.model.mtp_num_layers and start else None
    if folder is None:
        return
    try:
        missing = AutoBridge.from_hf_pretrained(folder).lacks_mtp_layers()
    except UserError as error:
        findings.problems.append(f"checkpoint.pretrained_checkpoint={start}: {error}")
        return
    if missing:
        drop_mtp_layers(config.model)
        findings.notes.append(
            f"model.mtp_num_layers=None is used: checkpoint.pretrained_checkpoint={start} has no tensors of "
            "multi-token prediction"
        )
