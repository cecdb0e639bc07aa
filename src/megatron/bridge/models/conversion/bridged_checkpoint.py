# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that a bridge reads and that its exports imitate."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from megatron.bridge.checkpoint import model_io
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.models.conversion import module_names
from megatron.bridge.models.conversion.adapters import peft_format
from megatron.bridge.models.conversion.engine import (
    export,
    mtp_layers,
    side_files,
    stored_provider,
)
from megatron.bridge.models.conversion.engine.export import SaveOptions
from megatron.bridge.models.conversion.engine.plan import ConversionPlan, build_plan
from megatron.bridge.models.conversion.engine.quantize import AS_TRAINED, Quantization
from megatron.bridge.models.conversion.engine.streaming import StoredModel
from megatron.bridge.models.conversion.mappings import patterns
from megatron.bridge.models.conversion.model_bridge import (
    MegatronModelBridge,
    as_dict,
    bridge_for,
)
from megatron.bridge.models.conversion.notes import Notes
from megatron.bridge.models.hf_pretrained import PreTrainedCausalLM, transformers_reads
from megatron.bridge.models.hf_pretrained.model_card import History
from megatron.bridge.models.hf_pretrained.safetensors_files import SafetensorsCheckpoint
from megatron.bridge.utils import console
from megatron.bridge.utils.errors import UserError

Chunks = (
    nn.Module | Sequence[nn.Module]
)  # this rank's chunks, wrapped or not: a list or a single chunk


class BridgedCheckpoint:
    """The parts of ``AutoBridge`` that relate a model to a checkpoint: plans, what is left out, and saving like it."""

    def __init__(self, hf_pretrained: Any) -> None:
        self.hf_pretrained = hf_pretrained
        self._bridge: MegatronModelBridge = bridge_for(self.hf_config)
        self._notes = Notes()

    @property
    def _model_bridge(self) -> MegatronModelBridge:
        """The bridge of the architecture, under the name by which other programs reach its mappings."""
        return self._bridge

    @property
    def hf_config(self) -> Any:
        return getattr(self.hf_pretrained, "config", self.hf_pretrained)

    def _export_plan(self, model: Chunks, source: SafetensorsCheckpoint | None) -> ConversionPlan:
        chunks: list[Any] = [model_io.unwrap(chunk) for chunk in model_io.as_chunks(model)]
        config = chunks[0].config
        entries = {} if source is None else source.entries
        registry = self._bridge.spelled_as(self._bridge.registry_for(config), entries)
        hf_config = as_dict(self.hf_config)
        return build_plan(
            module_names.follow_module_names(registry, entries, hf_config),
            chunks,
            None if source is None else entries,
            (*self._bridge.buffers, *self._bridge.carried_by(config, entries)),
            self._bridge.copies,
            self._left_out(config),
            self._bridge.replaced_by_head(config),
            partial(transformers_reads.unread_tensors, hf_config),
        )

    @cached_property
    def _mtp_layers(self) -> mtp_layers.MTPLayers | None:
        """The multi-token prediction layers that the config declares."""
        declared = self._bridge.provider_bridge(as_pretrained(self.hf_pretrained))
        return mtp_layers.declared_by(declared, self._bridge.registry_for)

    def _left_out(self, config: Any) -> mtp_layers.MTPLayers | None:
        """Return the declared multi-token prediction layers that the model of ``config`` was built without."""
        return None if getattr(config, "mtp_num_layers", None) else self._mtp_layers

    def _note_left_out(self, plan: ConversionPlan, source: SafetensorsCheckpoint | None) -> None:
        if source is None:
            return
        if self._mtp_layers is not None and self._mtp_layers.are_in(plan.buffers):
            self._notes.add(mtp_layers.LEFT_OUT.format(source.directory))
        self._notes.add_unread_tensors(plan.unread, source.directory)

    def _weights(self, hf_path: str | Path | None) -> PreTrainedCausalLM:
        if hf_path is not None:
            return PreTrainedCausalLM(hf_path)
        if not isinstance(self.hf_pretrained, PreTrainedCausalLM):
            raise UserError(
                "this bridge has a config and no weights: give hf_path, or load_weights=False"
            )
        return self.hf_pretrained

    def _source(self, path: str | Path | None) -> SafetensorsCheckpoint | None:
        if path is None and not isinstance(self.hf_pretrained, PreTrainedCausalLM):
            return None
        return self._weights(path).state

    def _export_source(
        self, model: Chunks, path: str | Path | None = None
    ) -> SafetensorsCheckpoint | None:
        """Return the weights that an export imitates, if they are local or tensors must be copied from them."""
        if path is None and not isinstance(self.hf_pretrained, PreTrainedCausalLM):
            return None
        pretrained = self._weights(path)
        provider = stored_provider.provider_of(model)
        names = pretrained.stored_names
        left_out = self._left_out(provider)
        carried: Any = self._bridge.carried_by(provider, {})
        carried = carried or (left_out is not None and (names is None or left_out.are_in(names)))
        return (
            pretrained.state
            if carried or on_first_rank(lambda: pretrained.has_weights_here)
            else None
        )

    def _save_pretrained(
        self,
        model: Chunks,
        path: Path,
        show_progress: bool,
        source_path: str | Path | None,
        options: SaveOptions,
        history: History,
        merge: bool = False,
        stored: StoredModel | None = None,
        overwrite: bool = False,
        quantization: Quantization | None = None,
    ) -> None:
        pretrained = PreTrainedCausalLM(source_path) if source_path else self.hf_pretrained
        source = self._export_source(model, source_path)
        if quantization is not None:
            model_type = getattr(self.hf_config, "model_type", None)
            provider = stored_provider.provider_of(model)
            quantizer = quantization.quantizer(source, model_type, provider)
            options = replace(options, quantizer=quantizer)
        self._note_trained_format(model, quantization)
        if source is None and isinstance(pretrained, PreTrainedCausalLM):
            options = replace(options, declared=pretrained.declared_dtype)
        with side_files.published(path, overwrite) as staging:
            self._save_weights(model, staging, source, options, merge, show_progress, stored)
            described = self._as_in_source(
                stored_provider.provider_of(model), source, options.strict
            )
            title = path.resolve().name
            on_first_rank(
                lambda: side_files.write(
                    self._bridge,
                    described,
                    pretrained,
                    staging,
                    title,
                    history,
                    options.dtype,
                    options.quantizer,
                )
            )
        note = side_files.precision_note(pretrained, options.quantizer)
        if show_progress:
            console.console().print(f"Hugging Face model: {path}{note}")

    def _note_trained_format(self, chunks: Chunks, quantization: Quantization | None) -> None:
        """Say that a model is written in another format than it was trained for."""
        trained_for = getattr(stored_provider.provider_of(chunks), "qat", None)
        if trained_for is None or (quantization is not None and quantization.name == AS_TRAINED):
            return
        written = "in full" if quantization is None else f"as {quantization.name}"
        self._notes.add(
            f"the model was trained with model.qat={trained_for!r} and is written {written}: --quantize trained writes "
            "the weights that it was trained with"
        )

    def _note_rounding(self, chunks: Chunks, source_path: str | Path | None) -> None:
        """Say that weights of an fp32 run are rounded, if the source is in half precision."""
        pretrained = PreTrainedCausalLM(source_path) if source_path else self.hf_pretrained
        target = pretrained.declared_dtype if isinstance(pretrained, PreTrainedCausalLM) else None
        self._notes.add_rounding(stored_provider.provider_of(chunks).params_dtype, target)

    def _save_weights(
        self,
        model: Chunks,
        staging: Path,
        source: SafetensorsCheckpoint | None,
        options: SaveOptions,
        merge: bool,
        show_progress: bool,
        stored: StoredModel | None = None,
    ) -> None:
        plan = self._export_plan(model, source if options.strict else None)
        self._note_left_out(plan, source)
        for pattern in self._bridge.carried_by(
            stored_provider.provider_of(model), source.entries if source else {}
        ):
            if all(patterns.match(pattern, name) is None for name in plan.buffers):
                raise UserError(
                    f"{pattern} is not converted and must come from the model's source, which "
                    f"{'has no such tensors' if source else 'is not given'}: use source_path=... and strict=True"
                )
        plan = peft_format.merging(plan) if merge else plan
        tasks = plan.tasks if stored is None else stored.filled(plan.tasks)
        tracked = console.track(tasks, "Exporting", total=len(plan.tasks), show=show_progress)
        export.save(self._bridge, plan, staging, source, options, tracked)

    def _as_in_source(
        self, provider: Any, source: SafetensorsCheckpoint | None, strict: bool
    ) -> Any:
        """Return ``provider`` with the same multi-token prediction layers as the source."""
        left_out = self._left_out(provider)
        if left_out is not None and source is not None and (strict or not left_out.are_in(source)):
            provider.mtp_num_layers = left_out.count
        return provider


def as_pretrained(hf_pretrained: Any) -> Any:
    """Return what bridges read a config from: a checkpoint, or an object with the attribute ``config``."""
    if isinstance(hf_pretrained, PreTrainedCausalLM):
        return hf_pretrained
    return SimpleNamespace(config=hf_pretrained)
