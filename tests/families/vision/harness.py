# SPDX-License-Identifier: Apache-2.0
"""A vision row's reference from transformers, and the same computed by the bridged model under a layout."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank
from safetensors.torch import save_file
from torch import Tensor

from megatron.bridge import AutoBridge
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.data.finetuning.packing import cut_for_rank
from megatron.bridge.models.vision.merge import media_rows
from tests.families import harness
from tests.families.vision.row import VisionRow
from tests.families.vision.rows import ROWS
from tests.families.vision.samples import LENGTH, PLACEHOLDERS, Sample, positions_of

LAYOUTS = {
    **harness.LAYOUTS,
    "cp2": {"context_parallel_size": 2, "cp_comm_type": "all_gather"},
    "tp2cp2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "context_parallel_size": 2,
        "cp_comm_type": "all_gather",
    },
    "tp4": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
    "unshared": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "share_images": False},
}


@dataclass(frozen=True)
class Case(harness.Case):
    """The name of a vision row and the folder with its reference."""

    @property
    def row(self) -> VisionRow:  # type: ignore[override]
        return ROWS[self.name]

    def samples(self, config: Any) -> list[Sample]:
        return self.row.samples(config)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Of what is trained."""
        carried = self.row.carried
        found = super().gradients.items()
        return {
            name: value
            for name, value in found
            if value.is_floating_point() and not name.startswith(carried)
        }


def make_reference(row: VisionRow, directory: Path) -> Case:
    """Make the row's model and let transformers compute logits and gradients, sample by sample."""
    case = Case(row.name, directory)
    model = harness.hf_model(row)
    harness.save(model, case.checkpoint)
    (case.checkpoint / "tokenizer.json").write_text(
        '{"version": "1.0", "note": "carried over, not read"}'
    )
    (case.checkpoint / "README.md").write_text("The card of a toy.\n")
    (case.checkpoint / "preprocessor_config.json").write_text('{"note": "carried over"}')
    if row.rewrite:
        row.rewrite(case.checkpoint)
    samples, logits = case.samples(model.config), []
    for sample in samples:
        found = hf_logits(model, sample, row)
        (F.cross_entropy(found.flatten(0, 1), sample.labels.flatten()) / len(samples)).backward()
        logits.append(found.detach())
    save_file({"logits": torch.cat(logits)}, directory / "expected.safetensors")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
        for buffer in harness.persistent_buffers(model):
            buffer.zero_()
    harness.save(model, directory / "gradients")
    if row.rewrite:
        row.rewrite(directory / "gradients")
    return case


def hf_logits(model: Any, sample: Sample, row: VisionRow) -> Tensor:
    """Of one sample, [1, sequence, vocabulary]."""
    types = {row.types_as: row.types(sample)} if row.types_as else {}
    media = row.encoded(model, sample.media) if row.encoded else row.for_transformers(sample.media)
    return model(input_ids=sample.ids, use_cache=False, **media, **types).logits


def build(case: Case, layout: str, ddp: bool = False) -> tuple[AutoBridge, list[Any]]:
    """Bridge and model of this rank, its weights loaded."""
    bridge = AutoBridge.from_hf_pretrained(case.checkpoint)
    provider = bridge.to_megatron_provider()
    for name, value in harness.settings(provider, LAYOUTS[layout], case.row.provider).items():
        assert hasattr(provider, name), f"a provider has no {name}"
        setattr(provider, name, value)
    overlapped = DistributedDataParallelConfig(
        overlap_grad_reduce=layout == "dp2", use_distributed_optimizer=False
    )
    return bridge, provider.provide_distributed_model(
        wrap_with_ddp=ddp, ddp_config=overlapped if ddp else None
    )


def forward_backward(model: list[Any], samples: list[Sample], row: VisionRow) -> Tensor | None:
    """One pass, a sample a microbatch; this rank's gradients are final after it.

    Returns:
        Logits [samples, sequence of this rank, vocabulary] on the last stage, None on the others.
    """
    found: list[Tensor] = []
    config = unwrap(model[0]).config
    config.finalize_model_grads_func = finalize_model_grads
    config.moe_aux_loss_coeff = 0.0
    if (
        getattr(model[0], "ddp_config", None) is not None
        and model[0].ddp_config.overlap_grad_reduce
    ):
        config.no_sync_func = model[0].no_sync

    def step(rows: Iterator[int], chunk: Any) -> tuple[Tensor, Any]:
        batch, media = this_rank(samples[next(rows)], row)

        def loss(logits: Tensor) -> tuple[Tensor, dict[str, Any]]:
            found.append(
                tensor_parallel.gather_from_tensor_model_parallel_region(logits.detach().clone())
            )
            losses = tensor_parallel.vocab_parallel_cross_entropy(
                logits.transpose(0, 1).contiguous(), batch["labels"].transpose(0, 1).contiguous()
            )
            total = losses.sum() / LENGTH
            return total, {}

        output = chunk(
            input_ids=batch["ids"],
            position_ids=batch["positions"],
            attention_mask=batch.get("sight"),
            media=media,
            media_rows=batch["rows"],
        )
        return output, loss

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(range(len(samples))) for _ in model],
        model=model,
        num_microbatches=len(samples),
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )
    return torch.cat(found) if found else None


def packed(samples: list[Sample], row: VisionRow) -> dict[str, Any]:
    """Arguments of a forward pass over all samples in one packed row, this rank's part of each."""
    length, group = LENGTH * len(samples), parallel_state.get_context_parallel_group()
    bounds = torch.arange(0, length + 1, LENGTH, dtype=torch.int32)
    mine = torch.from_numpy(cut_for_rank(bounds.numpy(), group.rank(), group.size()))
    ids = torch.cat([sample.ids for sample in samples], dim=1)
    media: dict[str, list[Tensor]] = {}
    for sample in samples:
        for name, value in row.for_model(sample.media).items():
            media.setdefault(name, []).append(value)
    seen = [sight for sample in samples if (sight := row.sight(sample)) is not None]
    return {
        "input_ids": ids[:, mine],
        "position_ids": torch.cat([positions_of(sample, row.mrope) for sample in samples], dim=-1),
        "attention_mask": torch.cat(seen, dim=1)[:, mine] if seen else None,
        "media": {name: torch.cat(values) for name, values in media.items()},
        "media_rows": media_rows(ids, *PLACEHOLDERS)[:, mine],
        "packed_seq_params": PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=LENGTH,
            max_seqlen_kv=LENGTH,
        ),
    }


def packed_error(case: Case, layout: str) -> float:
    """How far logits of a packed row are from those of its samples, over their deviation."""
    bridge, model = build(case, layout)
    given = packed(case.samples(bridge.hf_config), case.row)
    with torch.no_grad():
        found = model[0](**given)[0]
    group = parallel_state.get_context_parallel_group()
    bounds = given["packed_seq_params"].cu_seqlens_q.numpy()
    mine = torch.from_numpy(cut_for_rank(bounds, group.rank(), group.size()))
    expected = case.logits.flatten(0, 1)[mine]
    return harness.distance(expected, found[:, : expected.shape[-1]], case.logits.std())


def this_rank(sample: Sample, row: VisionRow) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A sample's tensors, those along the sequence cut as context parallelism does."""
    positions = positions_of(sample, row.mrope)
    batch = {
        "ids": sample.ids,
        "labels": sample.labels,
        "rows": media_rows(sample.ids, *PLACEHOLDERS),
        "positions": positions.reshape(-1, positions.shape[-1]),
    }
    if (sight := row.sight(sample)) is not None:
        batch["sight"] = sight
    batch = cut(batch)
    if row.mrope is not None:
        batch["positions"] = batch["positions"][:, None]
    return batch, row.for_model(sample.media)


def cut(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of each sequence, along the second dimension."""
    group = parallel_state.get_context_parallel_group()
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)


def numbers_and_bytes(case: Case, layout: str, output: Path) -> list[str]:
    """Runs on every rank: what differs from the reference under ``layout``, one line each."""
    bridge, model = build(case, layout, ddp=True)
    bridge.save_hf_pretrained(model, output, show_progress=False)
    problems = harness.different_files(case, output)
    rank, size = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    samples = case.samples(bridge.hf_config)[rank::size]
    logits = forward_backward(model, samples, case.row)
    if logits is not None:
        expected = cut({"logits": case.logits[rank::size]})["logits"]
        problems += harness.different_logits(expected, logits)
    for parameter in (p for chunk in model for p in chunk.parameters() if not p.requires_grad):
        parameter.main_grad = torch.zeros_like(parameter)  # no feature depends on it
    harness.gradients_for_weights(model)
    found = dict(bridge.export_hf_weights(model, show_progress=False))
    for copied in bridge.plan(model).ties:
        del found[copied]
    return problems + harness.different_gradients(case, found)
