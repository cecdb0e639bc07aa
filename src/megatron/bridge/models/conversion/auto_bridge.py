# SPDX-License-Identifier: Apache-2.0
"""``AutoBridge`` converts a Hugging Face model to a Megatron model and back."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from megatron.bridge.checkpoint import model_io
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.models.conversion.adapters import peft_format
from megatron.bridge.models.conversion.adapters.bridge_calls import AdapterCalls
from megatron.bridge.models.conversion.bridged_checkpoint import (
    BridgedCheckpoint,
    Chunks,
    as_pretrained,
)
from megatron.bridge.models.conversion.deviations import deviations_of
from megatron.bridge.models.conversion.engine import (
    buckets,
    export,
    load,
    mtp_layers,
    side_files,
    stored_provider,
    streaming,
)
from megatron.bridge.models.conversion.engine.buckets import BUCKET_BYTES
from megatron.bridge.models.conversion.engine.export import SaveOptions
from megatron.bridge.models.conversion.engine.plan import ConversionPlan, WeightConversionTask
from megatron.bridge.models.conversion.engine.quantize import Quantization
from megatron.bridge.models.conversion.model_bridge import (
    HFWeightTriple,
    HFWeightTuple,
    architectures,
    as_dict,
    bridge_for,
    is_known,
)
from megatron.bridge.models.hf_pretrained import PreTrainedCausalLM, hub
from megatron.bridge.models.hf_pretrained.causal_lm import to_dtype
from megatron.bridge.models.hf_pretrained.model_card import History
from megatron.bridge.models.model_provider import PreWrapHook, to_half_precision
from megatron.bridge.utils import console
from megatron.bridge.utils.errors import UserError


class AutoBridge(BridgedCheckpoint, AdapterCalls):
    """Convert models of every architecture that has a registered bridge.

    Args:
        hf_pretrained: the Hugging Face model or its config.
    """

    @classmethod
    def from_hf_pretrained(
        cls, path: str | Path, trust_remote_code: bool = False, **options: Any
    ) -> "AutoBridge":
        """Create a bridge for the model in a local directory or on the hub; weights are read when they are needed.

        Args:
            path: directory or hub id.
            trust_remote_code: run the model's own configuration code.
            **options: ``dtype``, ``revision``, ``cache_dir``, ``strip_prefix`` and ``adapter`` of
                ``PreTrainedCausalLM``.

        Raises:
            UserError: the path has no model, or the architecture is not supported.
        """
        return cls(
            PreTrainedCausalLM.from_pretrained(path, trust_remote_code=trust_remote_code, **options)
        )

    @classmethod
    def from_hf_config(cls, config: Any) -> "AutoBridge":
        """Create a bridge without weights for the architecture of a transformers config."""
        return cls(config)

    @classmethod
    def from_auto_config(
        cls, megatron_path: str | Path, hf_model_id: str | Path, trust_remote_code: bool = False
    ) -> "AutoBridge":
        """Create a bridge without weights for the model in a Megatron checkpoint.

        Its config is that of ``hf_model_id``, with what the checkpoint's model has changed, such as
        the number of layers of a pruned model.

        Args:
            megatron_path: root of a checkpoint, or one of its iterations.
            hf_model_id: directory or hub id of a model of the same architecture.
            trust_remote_code: run the model's own configuration code.

        Raises:
            UserError: there is no checkpoint, or the architecture cannot express its model.
        """
        reference: Any = PreTrainedCausalLM(hf_model_id, trust_remote_code=trust_remote_code).config
        provider = on_first_rank(lambda: stored_provider.read(megatron_path))
        plain_config = as_dict(reference)
        changes = bridge_for(reference).changed_config(provider, plain_config)
        config = cast(Any, type(reference)).from_dict({**plain_config, **changes})
        config.name_or_path = str(hf_model_id)
        return cls.from_hf_config(config)

    @classmethod
    def can_handle(cls, path: str | Path, trust_remote_code: bool = False) -> bool:
        """Return whether the model at ``path`` exists and its architecture is supported."""
        try:
            config = PreTrainedCausalLM(path, trust_remote_code=trust_remote_code).config
        except UserError:
            return False
        return cls.supports(config)

    @staticmethod
    def supports(config: Any) -> bool:
        """Return whether the architecture of a transformers config is supported."""
        return is_known(config)

    @staticmethod
    def list_supported_models() -> list[str]:
        """Return the supported Hugging Face architectures; their variants with other heads are also supported."""
        return architectures()

    def to_megatron_provider(
        self, load_weights: bool = True, hf_path: str | Path | None = None
    ) -> Any:
        """Return the provider of the Megatron model.

        Args:
            load_weights: fill the model with the Hugging Face weights when it is built.
            hf_path: model to load the weights from; None uses this bridge's own model.

        Raises:
            UserError: a config key that is unknown or cannot be represented.
        """
        provider = self._bridge.provider_bridge(as_pretrained(self.hf_pretrained))
        self._notes.add_unread_keys(self.unread_keys)
        provider.hf_config = self.hf_config
        if self.lacks_mtp_layers(hf_path, load_weights):
            provider.mtp_num_layers = None
            self._notes.add(
                mtp_layers.DECLARED_ONLY.format(self._weights(hf_path).model_name_or_path)
            )
        for deviation in deviations_of(self.hf_config):
            if deviation.is_noted:
                self._notes.add(deviation.note())
        if load_weights:
            # raises an error now if there are no weights, not after the model is built
            self._weights(hf_path).refuse_adapter()

            def load_hf_weights(chunks: list[Any]) -> None:
                self.load_hf_weights(chunks, hf_path)

            provider.register_pre_wrap_hook(
                PreWrapHook(load_hf_weights, fills_every_parameter=True)
            )
        return provider

    def lacks_mtp_layers(self, hf_path: str | Path | None = None, download: bool = False) -> bool:
        """Return whether the config declares multi-token prediction layers whose weights do not exist.

        Args:
            hf_path: model with the weights; None uses this bridge's own model.
            download: download the weights if necessary; otherwise weights that are not local count as complete.
        """
        if self._mtp_layers is None or not (
            hf_path or isinstance(self.hf_pretrained, PreTrainedCausalLM)
        ):
            return False
        pretrained = self._weights(hf_path)
        names = pretrained.stored_names or (pretrained.state.entries if download else None)
        return names is not None and not self._mtp_layers.are_in(names)

    @staticmethod
    def get_hf_model_id_from_checkpoint(path: str | Path) -> str | None:
        """Return the Hugging Face model that a Megatron checkpoint was made from, if it says so.

        Args:
            path: root of a checkpoint, or one of its iterations.
        """
        if not model_io.has_run_config(path):
            return None
        config = model_io.read_run_config(path)
        weights = _setting(config, "checkpoint", "pretrained_checkpoint")
        if weights and Path(weights).is_dir() and not hub.is_hf_model(weights):
            return AutoBridge.get_hf_model_id_from_checkpoint(weights)
        imported = config.get(model_io.HF_MODEL_ID)
        return imported or weights or _setting(config, "tokenizer", "tokenizer_model")

    @staticmethod
    def hf_config_of(provider: Any) -> dict[str, Any] | None:
        """Return the Hugging Face config of a bridge's provider, with later changes; None for other providers."""
        source = provider.declared.hf_config
        return (
            None
            if source is None
            else bridge_for(source).config_of(provider.declared, as_dict(source))
        )

    def to_megatron_model(
        self, load_weights: bool = True, hf_path: str | Path | None = None, **options: Any
    ) -> list[Any]:
        """Build this rank's chunks of the Megatron model; ``provide_distributed_model`` gets the ``options``."""
        return self.to_megatron_provider(load_weights, hf_path).provide_distributed_model(**options)

    def load_hf_weights(
        self,
        model: Chunks,
        hf_path: str | Path | None = None,
        allowed_mismatched_params: Sequence[str] | None = None,
    ) -> None:
        """Fill the parameters of ``model``; each rank reads only the slices that it needs.

        Args:
            model: this rank's chunks, wrapped or not.
            hf_path: model to load the weights from; None uses this bridge's own model.
            allowed_mismatched_params: patterns of Megatron parameters that keep their values if the shapes differ.

        Raises:
            UserError: tensors are missing, unexpected or damaged, or have wrong shapes or dtypes; no value changes.
        """
        pretrained = self._weights(hf_path)
        pretrained.refuse_adapter()
        plan = self.plan(model, hf_path)
        self._note_left_out(plan, pretrained.state)
        load.load(
            self._bridge,
            plan,
            pretrained.state,
            pretrained.declared_dtype,
            allowed_mismatched_params,
        )

    def export_hf_weights(
        self,
        model: Chunks,
        cpu: bool = False,
        show_progress: bool = True,
        conversion_tasks: Iterable[WeightConversionTask] | None = None,
        merge_adapter_weights: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        weight_dtype: torch.dtype | str | None = None,
        with_megatron_names: bool = False,
    ) -> Iterator[HFWeightTuple | HFWeightTriple]:
        """Yield full Hugging Face tensors one at a time on every rank; the ranks exchange them in buckets.

        Args:
            model: this rank's chunks.
            cpu: move each tensor to the CPU.
            show_progress: show a progress bar on rank 0.
            conversion_tasks: tasks from ``get_conversion_tasks`` to convert; None converts all.
            merge_adapter_weights: merge adapters into the weights; False yields the weights of the base model.
            bucket_bytes: memory that a rank needs in addition to its part of the model, if the caller releases yielded
                tensors; a larger tensor needs its own size. Must be equal on all ranks.
            weight_dtype: convert floating-point tensors to this dtype; None keeps their dtypes.
            with_megatron_names: also yield the name of the Megatron parameter; for a tensor that holds all experts, the
                name of the last expert's parameter.

        Yields:
            (param_name, weight), or (param_name, weight, megatron_name), in the order of the model.
        """
        dtype = to_dtype(weight_dtype)
        source = self._export_source(model)
        plan = (
            self._export_plan(model, source)
            if conversion_tasks is None
            else ConversionPlan(tuple(conversion_tasks))
        )
        plan = peft_format.merging(plan) if merge_adapter_weights else plan
        stream = buckets.stream(self._bridge, plan, source, cpu, bucket_bytes)
        total = len(plan.hf_names) + len(plan.ties)
        for task, (name, weight) in console.track(
            stream, "Exporting", total=total, show=show_progress
        ):
            converted = (
                weight.to(dtype) if dtype is not None and weight.is_floating_point() else weight
            )
            named = HFWeightTuple(name, converted)
            yield HFWeightTriple(*named, task.global_param_name) if with_megatron_names else named

    def export_hf_weights_quant(
        self,
        model: Chunks,
        quantization_checker: Callable[[str], bool],
        quant_fn: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        quant_block_size: tuple[int, int] | None = None,
        cpu: bool = False,
        show_progress: bool = True,
        conversion_tasks: Iterable[WeightConversionTask] | None = None,
        merge_adapter_weights: bool = False,
    ) -> Iterator[HFWeightTuple]:
        """Yield full Hugging Face tensors like ``export_hf_weights``, some of them quantized by the caller's function.

        Args:
            model: this rank's chunks.
            quantization_checker: whether the tensors of a Megatron parameter, given by name, are quantized.
            quant_fn: called with a full tensor and ``quant_block_size``; returns its codes and scales.
            quant_block_size: passed to ``quant_fn``.
            cpu: move each tensor to the CPU.
            show_progress: show a progress bar on rank 0.
            conversion_tasks: tasks from ``get_conversion_tasks`` to convert; None converts all.
            merge_adapter_weights: merge adapters into the weights; False yields the weights of the base model.

        Yields:
            (param_name, weight), in the order of the model; the scales of a quantized tensor follow it, under its name
            and ``_scale_inv``.
        """
        weights = self.export_hf_weights(
            model,
            show_progress=show_progress,
            conversion_tasks=conversion_tasks,
            merge_adapter_weights=merge_adapter_weights,
            with_megatron_names=True,
        )
        for triple in weights:
            name, weight, megatron_name = cast(HFWeightTriple, triple)
            tensors = {name: weight}
            if quantization_checker(megatron_name):
                codes, scales = quant_fn(weight, quant_block_size)
                tensors = {name: codes, f"{name}_scale_inv": scales}
            for part, tensor in tensors.items():
                yield HFWeightTuple(part, tensor.cpu() if cpu else tensor)

    def save_hf_pretrained(
        self,
        model: Chunks,
        path: str | Path,
        show_progress: bool = True,
        source_path: str | Path | None = None,
        strict: bool = True,
        merge_adapter_weights: bool = True,
        history: History | None = None,
        distributed_save: bool | None = None,
        save_every_n_ranks: int = 1,
        weight_dtype: torch.dtype | str | None = None,
        overwrite: bool = True,
        quantize: str | None = None,
        group_size: int | None = None,
        keep_high: Sequence[str] = (),
    ) -> None:
        """Write a complete Hugging Face model, sharded like its source; the directory is published atomically.

        Config, tokenizer, chat template and all other files of the source are copied. The model card describes any
        changes to the weights above the text of the source's card.

        Args:
            model: this rank's chunks.
            path: directory to create or to add to: its files stay, except the weights of an earlier save.
            show_progress: show a progress bar and print the path on rank 0.
            source_path: the Hugging Face model to imitate; None uses this bridge's own model.
            strict: refuse to write tensors whose names differ from the source's.
            merge_adapter_weights: merge adapters into the weights; False writes the weights of the base model.
            history: facts for the model card; None reports only the merged adapters, because nothing else is known.
            distributed_save: None and True let every rank write the tensors that it owns, which needs a shared file
                system; False lets rank 0 write everything.
            save_every_n_ranks: with ``distributed_save``, let only every n-th rank write.
            weight_dtype: dtype of floating-point tensors; None keeps the source's dtypes.
            overwrite: replace the weights that an earlier save wrote to ``path``; other weights are refused.
            quantize: write matrices of attention, MLPs and experts in this format: ``fp8-block``, ``fp8-tensor``,
                ``mxfp8``, ``mxfp4``, ``nvfp4``, ``int4``, ``int4-awq``, ``int8``; ``source`` writes what was not
                trained bitwise as in a quantized source, and the rest in its format; ``trained`` writes what
                ``model.qat`` rounded, in its format. None writes weights in full.
            group_size: how many neighbors share a scale, for ``fp8-block``, ``int4`` and ``int4-awq``.
            keep_high: patterns of Hugging Face names that stay in full.

        Raises:
            UserError: the directory cannot be written, the disk is full, or the tensors differ from the source's.
        """
        quantization = Quantization.of_keywords(quantize, group_size, keep_high)
        if quantization is not None and (distributed_save is False or save_every_n_ranks > 1):
            raise UserError(
                f"quantize={quantize!r} lets every rank write: leave out distributed_save=False and save_every_n_ranks"
            )
        folder = Path(path)
        history = history or side_files.history_of(model, merge_adapter_weights)
        options = SaveOptions.of_keywords(
            strict, weight_dtype, distributed_save, save_every_n_ranks, folder
        )
        self._save_pretrained(
            model,
            folder,
            show_progress,
            source_path,
            options,
            history,
            merge_adapter_weights,
            overwrite=overwrite,
            quantization=quantization,
        )

    def save_hf_weights(
        self,
        model: Chunks,
        path: str | Path,
        show_progress: bool = True,
        strict: bool = True,
        merge_adapter_weights: bool = True,
        distributed_save: bool | None = None,
        save_every_n_ranks: int = 1,
        weight_dtype: torch.dtype | str | None = None,
        overwrite: bool = True,
    ) -> None:
        """Write only the weights and their index; see ``save_hf_pretrained``."""
        folder = Path(path)
        options = SaveOptions.of_keywords(
            strict, weight_dtype, distributed_save, save_every_n_ranks, folder
        )
        with side_files.published(folder, overwrite) as staging:
            source = self._export_source(model)
            self._save_weights(
                model, staging, source, options, merge_adapter_weights, show_progress
            )
        if show_progress:
            console.console().print(f"Hugging Face weights: {path}")

    def check_export(self, model: Chunks) -> None:
        """Make the plan, the files and the config of ``save_hf_pretrained`` without writing anything.

        All ranks must call this. The chunks may be on the meta device.

        Raises:
            UserError: the model cannot be exported.
        """
        source = self._export_source(model)
        provider = stored_provider.provider_of(model)
        self._bridge.changed_config(provider, as_dict(self.hf_config))
        export.check(self._bridge, self._export_plan(model, source), source, SaveOptions())

    def push_to_hub(self, path: str | Path, repo_id: str | None = None, **options: Any) -> str:
        """Upload an exported model to the hub in one commit.

        Args:
            path: directory that ``save_hf_pretrained`` or ``export_ckpt`` wrote.
            repo_id: ``owner/name``; None uses the directory's name in the user's own account.
            **options: ``private``, ``revision``, ``commit_message`` and ``token`` of ``hub.push``.

        Returns:
            The URL of the model.

        Raises:
            UserError: the directory has no model, or the hub refuses the upload.
        """
        return hub.push(path, repo_id or Path(path).resolve().name, **options)

    @classmethod
    def import_ckpt(
        cls,
        hf_model_id: str | Path,
        megatron_path: str | Path,
        show_progress: bool = True,
        **options: Any,
    ) -> None:
        """Convert a Hugging Face model to a Megatron checkpoint; see ``save_megatron_checkpoint``.

        Args:
            hf_model_id: directory or hub id.
            megatron_path: root directory of the checkpoint.
            show_progress: show a progress bar on rank 0.
            **options: options of ``from_hf_pretrained``, and parallel sizes for the conversion.
        """
        layout = {
            name: options.pop(name) for name in stored_provider.ONE_PROCESS if name in options
        }
        bridge = cls.from_hf_pretrained(hf_model_id, **options)
        provider = bridge.to_megatron_provider(load_weights=False)
        for name, value in layout.items():
            setattr(provider, name, value)
        bridge.save_megatron_checkpoint(provider, megatron_path, show_progress)

    def save_megatron_checkpoint(
        self, provider: Any, path: str | Path, show_progress: bool = True
    ) -> None:
        """Write this bridge's weights as a Megatron checkpoint of the model that ``provider`` describes.

        Each rank converts a few parameters of its part at a time, so the full model is never in memory. The files equal
        those of ``save_megatron_model`` byte for byte.

        Args:
            provider: result of ``to_megatron_provider`` with its parallel sizes set.
            path: root directory of the checkpoint.
            show_progress: show a progress bar on rank 0.

        Raises:
            UserError: tensors are missing, unexpected or damaged, or the directory cannot be written; no files remain.
        """
        pretrained = self._weights(None)
        pretrained.refuse_adapter()
        outline = provider.meta_model()
        plan = self._export_plan(outline, pretrained.state)
        self._note_left_out(plan, pretrained.state)
        chunks = to_half_precision(outline, outline[0].config)
        planner = streaming.planner(self._bridge, plan, chunks, pretrained, show_progress)
        side_files.save_megatron(chunks, path, pretrained, planner)

    def export_ckpt(
        self,
        megatron_path: str | Path,
        hf_path: str | Path,
        show_progress: bool = True,
        strict: bool = True,
        source_path: str | Path | None = None,
        mp_overrides: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        weight_dtype: torch.dtype | str | None = None,
        quantize: str | None = None,
        group_size: int | None = None,
        keep_high: Sequence[str] = (),
    ) -> None:
        """Convert a Megatron checkpoint to a Hugging Face model; see ``save_hf_pretrained``.

        Each rank converts a few parameters of its part at a time, so the full model is never in memory.

        Args:
            megatron_path: root of a checkpoint, or one of its iterations.
            hf_path: directory to create.
            show_progress: show a progress bar and print the path on rank 0.
            strict: refuse to write tensors whose names differ from the source's.
            source_path: the Hugging Face model to imitate; None uses this bridge's own model.
            mp_overrides: parallel sizes; missing sizes come from the running process groups, or are 1.
            overwrite: replace the weights that an earlier save wrote to ``hf_path``.
            weight_dtype: dtype of floating-point tensors; None keeps the source's dtypes.
            quantize: write matrices of attention, MLPs and experts in this format: ``fp8-block``, ``fp8-tensor``,
                ``mxfp8``, ``mxfp4``, ``nvfp4``, ``int4``, ``int4-awq``, ``int8``; ``source`` writes what was not
                trained bitwise as in a quantized source, and the rest in its format; ``trained`` writes what
                ``model.qat`` rounded, in its format. None writes weights in full.
            group_size: how many neighbors share a scale, for ``fp8-block``, ``int4`` and ``int4-awq``.
            keep_high: patterns of Hugging Face names that stay in full.
        """
        quantization = Quantization.of_keywords(quantize, group_size, keep_high)
        chunks, stored = streaming.stored_model(
            megatron_path, mp_overrides, self.to_megatron_provider
        )
        history = on_first_rank(lambda: side_files.history_of_checkpoint(megatron_path))
        dtype = to_dtype(weight_dtype)
        if dtype is None:
            self._note_rounding(chunks, source_path)
        options = SaveOptions(strict, dtype, folder=Path(hf_path))
        self._save_pretrained(
            chunks,
            Path(hf_path),
            show_progress,
            source_path,
            options,
            history,
            stored=stored,
            overwrite=overwrite,
            quantization=quantization,
        )

    def export_stored_weights(
        self, megatron_path: str | Path, mp_overrides: Mapping[str, Any] | None = None
    ) -> Iterator[HFWeightTuple]:
        """Yield the weights of a Megatron checkpoint like ``export_hf_weights``, without the full model in memory.

        Args:
            megatron_path: root of a checkpoint, or one of its iterations.
            mp_overrides: parallel sizes; missing sizes come from the running process groups, or are 1.

        Yields:
            (param_name, weight), in the order of the model.
        """
        chunks, stored = streaming.stored_model(
            megatron_path, mp_overrides, self.to_megatron_provider
        )
        source = self._export_source(chunks)
        plan = self._export_plan(chunks, source)
        stream = buckets.stream(
            self._bridge, plan, source, cpu=True, tasks=stored.filled(plan.tasks)
        )
        yield from (named for _, named in stream)

    def save_megatron_model(
        self, model: Chunks, path: str | Path, hf_tokenizer_path: str | Path | None = None
    ) -> None:
        """Save the weights of all ranks as a Megatron checkpoint that loads under any parallel layout.

        Args:
            model: this rank's chunks.
            path: root directory of the checkpoint.
            hf_tokenizer_path: model whose tokenizer is saved with the weights; None uses this bridge's own model.
        """
        source = PreTrainedCausalLM(hf_tokenizer_path) if hf_tokenizer_path else self.hf_pretrained
        side_files.save_megatron(model, path, source)

    def load_megatron_model(
        self,
        path: str | Path,
        mp_overrides: Mapping[str, Any] | None = None,
        skip_temp_dist_context: bool | None = None,
        **options: Any,
    ) -> list[Any]:
        """Build the model of a Megatron checkpoint and load its weights.

        Args:
            path: root of a checkpoint, or one of its iterations.
            mp_overrides: parallel sizes; missing sizes come from the running process groups, or are 1.
            skip_temp_dist_context: None and True use the existing process groups, and keep those that this call
                creates; False is refused.
            **options: options of ``provide_distributed_model``.

        Raises:
            UserError: the checkpoint is missing or damaged, or a parallel size is unknown.
        """
        if skip_temp_dist_context is False:
            raise UserError(
                "skip_temp_dist_context=False asks for process groups that end with the call: leave it out, and call "
                "torch.distributed.destroy_process_group() when the model is no longer needed"
            )
        provider = stored_provider.read_for_layout(path, mp_overrides)
        return provider.provide_distributed_model(
            **options, pre_wrap_hook=stored_provider.load_hook(path)
        )

    def plan(self, model: Chunks, hf_path: str | Path | None = None) -> ConversionPlan:
        """Return the plan, which lists how each tensor is converted and covers all tensors of both sides.

        Raises:
            UserError: a tensor of one side has no counterpart.
        """
        return self._export_plan(model, self._source(hf_path))

    def get_conversion_tasks(
        self,
        model: Chunks | None = None,
        hf_path: str | Path | None = None,
        *,
        megatron_model: Chunks | None = None,
    ) -> list[WeightConversionTask]:
        """Return the tasks of ``plan``, equal on every rank; ``megatron_model`` is another name for ``model``."""
        if (model is None) == (megatron_model is None):
            raise UserError(
                "get_conversion_tasks takes either model or megatron_model: give this rank's chunks"
            )
        return list(
            self.plan(cast(Chunks, megatron_model if model is None else model), hf_path).tasks
        )

    @property
    def mapping_registry(self) -> Any:
        return self._bridge.registry_for(self.transformer_config)

    def not_converted(self, config: Any) -> tuple[str, ...]:
        """Return patterns of the Hugging Face tensors that the model of the provider ``config`` does not use."""
        left_out = self._left_out(config)
        source = self._source(None)
        carried = self._bridge.carried_by(config, source.entries if source else {})
        return (*self._bridge.buffers, *carried, *(left_out.patterns if left_out else ()))

    @cached_property
    def transformer_config(self) -> Any:
        """The provider with Megatron-Core's derived values filled in."""
        return self.to_megatron_provider(load_weights=False).resolved()

    @property
    def unread_keys(self) -> dict[str, Any]:
        """Dotted keys of the config that neither transformers' model nor this one reads, with their values.

        They are known once ``to_megatron_provider`` has read the config. An export carries them along.
        """
        return dict(getattr(self._bridge, "unread_keys", {}))


def _setting(config: Mapping[str, Any], block: str, name: str) -> str | None:
    """Return a setting of a run's config, which may lack the block."""
    settings: Any = config.get(block) or {}
    value = settings.get(name)
    return None if value is None else str(value)
