# SPDX-License-Identifier: Apache-2.0
"""The default adapters of fine-tuning recipes, and SQuAD, the default dataset of fine-tuning examples."""

from typing import Any

from megatron.bridge.data.builders.hf_dataset import HFDatasetConfig
from megatron.bridge.data.config import PackedSequenceSpecs
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.mamba_provider import MambaModelProvider
from megatron.bridge.peft.base import PEFT
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.utils.errors import UserError, did_you_mean

METHODS: dict[str, type[LoRA] | type[DoRA]] = {"lora": LoRA, "dora": DoRA, "qlora": LoRA}

TARGETS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
LATENT_TARGETS = ["*.self_attention.linear_*", "linear_fc1", "linear_fc2"]
"""Targets for multi-latent attention, whose projections differ between model sizes."""
RECURRENT_TARGETS = [*TARGETS, "out_proj"]
"""Targets for Mamba layers and delta nets, whose fused input projections get no adapters under TP."""


def default_peft_config(
    peft_scheme: str | PEFT, model: GPTModelProvider | None = None, **changes: Any
) -> PEFT:
    """Return adapters of rank 16 and alpha 32 on all linear layers of attention and MLP.

    Args:
        peft_scheme: ``lora``, ``dora`` or ``qlora``. A ``PEFT`` object is returned unchanged.
        model: The model that gets the adapters. None stands for plain attention in all layers.
        **changes: Fields of the adapter with other values.
    """
    if isinstance(peft_scheme, PEFT):
        return peft_scheme
    if peft_scheme not in METHODS:
        hint = did_you_mean(peft_scheme, METHODS) or f": choose {' or '.join(METHODS)}"
        raise UserError(f"peft={peft_scheme} is not known{hint}; peft=None trains all weights")
    fields: dict[str, Any] = {"target_modules": _target_modules(model), "dim": 16, "alpha": 32}
    if peft_scheme == "qlora":
        fields |= _low_bit_base(model)
    fields.update(changes)
    return METHODS[peft_scheme](**fields)


def _low_bit_base(model: GPTModelProvider | None) -> dict[str, Any]:
    """Return the format of the base: the one that the model is published in, else NF4."""
    config: dict[str, Any] = AutoBridge.hf_config_of(model) or {} if model is not None else {}
    quantization: dict[str, Any] = config.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if method == "mxfp4" or config.get("model_type") == "gpt_oss":
        # only the experts are published in 4 bits
        return {"base_precision": "mxfp4", "base_keep_high": ["*.self_attention.*"]}
    return {"base_precision": "fp8" if method == "fp8" else "nf4"}


def _target_modules(model: GPTModelProvider | None) -> list[str]:
    if model is None:
        return [*TARGETS]
    if model.multi_latent_attention:
        return [*LATENT_TARGETS]
    if isinstance(model, MambaModelProvider) or model.experimental_attention_variant is not None:
        return [*RECURRENT_TARGETS]
    return [*TARGETS]


def squad_example(record: dict[str, Any]) -> dict[str, str]:
    """Return prompt and completion: the text with a question, and the question's first answer."""
    prompt = f"Context: {record['context']} Question: {record['question']} Answer:"
    return {"prompt": prompt, "completion": f" {record['answers']['text'][0].strip()}"}


def default_squad_config(
    seq_length: int, packed_sequence: bool = True, pad_seq_to_mult: int | None = None
) -> HFDatasetConfig:
    """Return the config of SQuAD, a data set of questions on a text.

    Args:
        seq_length: Tokens of a sample.
        packed_sequence: Pack several samples into one row of ``seq_length`` tokens.
        pad_seq_to_mult: Pad each sample to a multiple of this; None means what the parallel layout requires.
    """
    packing = PackedSequenceSpecs(packed_sequence_size=seq_length, pad_seq_to_mult=pad_seq_to_mult)
    return HFDatasetConfig(
        seq_length=seq_length,
        dataset_name="rajpurkar/squad",
        process_example_fn=squad_example,
        validation_split="validation",
        do_test=False,
        packed_sequence_specs=packing if packed_sequence else None,
    )
