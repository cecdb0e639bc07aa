# SPDX-License-Identifier: Apache-2.0
"""The methods of ``AutoBridge`` for adapters."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from megatron.bridge.checkpoint import model_io
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.models.conversion.adapters import peft_format
from megatron.bridge.models.conversion.engine import side_files
from megatron.bridge.models.conversion.engine.plan import ConversionPlan, build_plan, tied_names
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.mappings import patterns
from megatron.bridge.models.conversion.model_bridge import (
    HFWeightTriple,
    HFWeightTuple,
    MegatronModelBridge,
)
from megatron.bridge.models.hf_pretrained import PreTrainedCausalLM
from megatron.bridge.utils import console, distributed
from megatron.bridge.utils.errors import UserError

Chunks = nn.Module | Sequence[nn.Module]


class AdapterCalls:
    """The base class of ``AutoBridge`` with its methods for adapters."""

    hf_pretrained: Any
    mapping_registry: Any
    _bridge: MegatronModelBridge

    @property
    def adapter_registry(self) -> MegatronMappingRegistry:
        """The mappings under the module names of transformers, which ``peft`` uses in the names of adapter tensors."""
        return self._bridge.as_modules(self.mapping_registry)

    def _adapter_plan(self, model: Chunks) -> ConversionPlan:
        chunks: list[Any] = [model_io.unwrap(chunk) for chunk in model_io.as_chunks(model)]
        config = chunks[0].config
        registry = self._bridge.as_modules(self._bridge.registry_for(config))
        plan = replace(build_plan(registry, chunks), buffers=self._carried_tensors(config))
        if not getattr(config, "share_embeddings_and_output_weights", False):
            return plan
        return replace(plan, ties=tied_names(registry))

    def _carried_tensors(self, config: Any) -> tuple[str, ...]:
        """Return the tensors of the source that belong to parts that the model lacks, such as audio."""
        stored: dict[str, Any] = dict.fromkeys(
            getattr(self.hf_pretrained, "stored_names", None) or ()
        )
        carried = self._bridge.carried_by(config, stored)
        return tuple(
            name
            for name in stored
            if any(patterns.match(pattern, name) is not None for pattern in carried)
        )

    def export_adapter_weights(
        self,
        model: Chunks,
        cpu: bool = True,
        show_progress: bool = True,
        prefix: str = "",
        with_megatron_names: bool = False,
    ) -> Iterator[HFWeightTuple | HFWeightTriple]:
        """Yield only the adapters as full tensors on every rank, under the names of the ``peft`` library.

        Args:
            model: this rank's chunks, with adapters.
            cpu: move each tensor to the CPU.
            show_progress: show a progress bar on rank 0.
            prefix: prefix of every name; ``peft``'s own files use ``base_model.model.``.
            with_megatron_names: also yield the name of the Megatron parameter that the adapter modifies.

        Yields:
            (param_name, weight), such as ``model.layers.0.self_attn.q_proj.lora_A.weight``.
        """
        plan = self._adapter_plan(model)
        stream = peft_format.stream(plan)
        for adapter in console.track(
            stream, "Exporting", total=len(plan.hf_names), show=show_progress
        ):
            for name, weight in adapter.named(prefix).items():
                named = HFWeightTuple(name, weight.cpu() if cpu else weight)
                yield (
                    HFWeightTriple(*named, adapter.megatron_param) if with_megatron_names else named
                )

    def save_hf_adapter(
        self,
        model: Chunks,
        path: str | Path,
        peft_config: Any = None,
        base_model_name_or_path: str | Path | None = None,
        show_progress: bool = True,
        overwrite: bool = True,
        chat_template: str | None = None,
    ) -> None:
        """Write a directory that ``peft.PeftModel.from_pretrained`` loads; the directory is published atomically.

        Args:
            model: this rank's chunks, with adapters.
            path: directory to create or to add to: its files stay, except the adapter of an earlier save.
            peft_config: must match the config that created the adapters, which is known; another config is refused.
            base_model_name_or_path: base model to record in the adapter; None records this bridge's own model.
            show_progress: print the path on rank 0.
            overwrite: replace the adapter that an earlier save wrote to ``path``; other weights are refused.
            chat_template: text of the template that the adapter was trained with; it is written together with the
                base's tokenizer, which has another one. None writes no tokenizer, because the base's is right.
        """
        if peft_config is not None:
            peft_format.refuse_other_config(model_io.as_chunks(model), peft_config)
        base = base_model_name_or_path
        if base is None and isinstance(self.hf_pretrained, PreTrainedCausalLM):
            base = self.hf_pretrained.model_name_or_path
        name = None if base is None else str(base)
        with side_files.published(Path(path), overwrite) as staging:
            peft_format.save(
                self._adapter_plan(model), staging, name, write=distributed.rank() == 0
            )
            if chat_template is not None:
                text = chat_template
                on_first_rank(lambda: self._write_tokenizer(staging, text))
        if show_progress:
            console.console().print(f"Adapter: {path}")

    def _write_tokenizer(self, directory: Path, chat_template: str) -> None:
        if isinstance(self.hf_pretrained, PreTrainedCausalLM):
            for path in side_files.tokenizer_files(self.hf_pretrained):
                if path.name not in side_files.OF_MODEL:
                    shutil.copyfile(path, directory / path.name)
        side_files.write_chat_template(directory, chat_template)

    def export_adapter_ckpt(
        self,
        peft_checkpoint: str | Path,
        output_path: str | Path,
        show_progress: bool = True,
        exclude_adapter_base_prefixes: Iterable[str] | None = None,
        expand_shared_outer: bool = False,
    ) -> None:
        """Write the adapters of a run's checkpoint for ``peft.PeftModel.from_pretrained``, in one process.

        Args:
            peft_checkpoint: run, or one of its checkpoints. This bridge has its base weights.
            output_path: directory to create.
            show_progress: print the path.
            exclude_adapter_base_prefixes: only None; all adapters are written.
            expand_shared_outer: has no effect: experts share no factors.

        Raises:
            UserError: there are no adapters, or they belong to other base weights.
        """
        del expand_shared_outer
        if exclude_adapter_base_prefixes is not None:
            raise UserError(
                f"exclude_adapter_base_prefixes={list(exclude_adapter_base_prefixes)} would leave out "
                "trained adapters: leave it out, and remove the tensors from the file if you must"
            )
        # imported by name, because the adapters' package is above this one
        adapters = import_module("megatron.bridge.peft.checkpoint")
        chunks = adapters.load_adapted(self, Path(peft_checkpoint))
        template = model_io.trained_template(peft_checkpoint)
        self.save_hf_adapter(
            chunks, output_path, show_progress=show_progress, chat_template=template
        )

    def load_hf_adapter(self, model: Chunks, path: str | Path) -> None:
        """Load the model's adapters from a directory in the format of the ``peft`` library.

        The chunks must have been adapted with ``peft.hf_adapter.peft_for`` of ``path``. If any adapter differs, no
        value changes.
        """
        peft_format.load(self._adapter_plan(model), Path(path))
