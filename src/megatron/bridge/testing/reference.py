# SPDX-License-Identifier: Apache-2.0
"""A row's reference from transformers, and the same computed by the bridged model under a parallel layout.

``make_reference`` leaves a folder behind: ``hf`` is the checkpoint, ``expected.safetensors`` has logits, and
``gradients`` has the loss's gradients under the names of the checkpoint.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
import transformers
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.bridge import AutoBridge
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.models.hf_pretrained.model_folder import RECORD
from megatron.bridge.testing.row import Row

LOGITS = 1e-4  # largest difference of two logits over the standard deviation of all, in float32
GRADIENTS = 1e-3  # largest difference of two gradients over the root mean square of the tensor's

_SP = {"sequence_parallel": True}
_TP2 = {"tensor_model_parallel_size": 2}
_PP2 = {"pipeline_model_parallel_size": 2}
_EP2 = {"expert_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": _TP2,
    "sp2": {**_TP2, **_SP},
    "pp2": _PP2,
    # overlapped sends: batched ones mix up the two neighbors when they are the same process
    "vp2": {
        **_PP2,
        "virtual_pipeline_model_parallel_size": 2,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    },
    "dp2": {},
    "ep2": _EP2,
    "etp2": {**_TP2, **_SP, "expert_tensor_parallel_size": 2},
    "tp2pp2": {**_TP2, **_PP2},
    "tp2ep2": {**_TP2, **_SP, **_EP2, "expert_tensor_parallel_size": 1},
    "tp2pp2ep2": {**_TP2, **_SP, **_PP2, **_EP2, "expert_tensor_parallel_size": 1},
}


class ReferenceFiles:
    """What ``make_reference`` leaves in a folder."""

    row: Row
    directory: Path

    @property
    def checkpoint(self) -> Path:
        return self.directory / "hf"

    @property
    def logits(self) -> Tensor:
        """[rows, sequence, vocabulary]."""
        return load_file(self.directory / "expected.safetensors")["logits"]

    @property
    def gradients(self) -> dict[str, Tensor]:
        return read_weights(self.directory / "gradients")

    @property
    def values(self) -> dict[str, Tensor] | None:
        """What a quantized checkpoint stands for; None where it stores that itself."""
        plain = self.directory / "plain"
        return read_weights(plain) if plain.exists() else None

    @property
    def batch(self) -> tuple[Tensor, Tensor]:
        """Token ids and labels, both [rows, sequence]."""
        return self._ids(1), self._ids(2)

    def _ids(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.row.config["vocab_size"], (2, 40), generator=generator)


@dataclass(frozen=True)
class Case(ReferenceFiles):
    row: Row
    directory: Path


def make_reference(row: Row, directory: Path) -> Case:
    """Make the row's model and let transformers compute logits and gradients."""
    case = Case(row, directory)
    model = hf_model(row)
    save(model, case.checkpoint)
    (case.checkpoint / "tokenizer.json").write_text(
        '{"version": "1.0", "note": "carried over, not read"}'
    )
    (case.checkpoint / "README.md").write_text("The card of a toy.\n")
    values = row.rewrite(case.checkpoint) if row.rewrite else None
    if values is not None:
        model = _with_values(model, values, directory / "plain")
    ids, labels = case.batch
    logits = model(input_ids=ids, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    save_file({"logits": logits.detach()}, directory / "expected.safetensors")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
        for buffer in persistent_buffers(model):
            buffer.zero_()
    save(model, directory / "gradients")
    return case


def hf_model(row: Row) -> Any:
    """Return the row's transformers model; all of it is random, so that a missing tensor changes the logits."""
    kind = getattr(transformers, row.model) if isinstance(row.model, str) else row.model
    config = kind.config_class(**row.config)
    config._attn_implementation = row.attention
    torch.manual_seed(row.seed)
    model = kind(config).eval()
    model.config.dtype = torch.float32
    randomise(model)
    return model


def randomise(model: Any) -> None:
    """Norms around one and the rest around zero, buffers around where they start, so that a dropped tensor shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # as wide as keeps the size of what a matrix is multiplied with
            width = 0.2 if parameter.dim() < 2 else min(0.2, 1.4 / parameter.shape[-1] ** 0.5)
            # some norms are stored as their distance from one: all as they start; a gain of two makes noise grow
            is_norm = "norm" in name and parameter.dim() == 1
            parameter.normal_(parameter.mean().item() if is_norm else 0.0, width)
        for buffer in filter(torch.is_floating_point, persistent_buffers(model)):
            mean = buffer.float().mean().item()
            if math.isinf(mean):  # limits start where they change nothing
                buffer.copy_(math.copysign(1.0, mean) * (1 + 0.2 * torch.rand(buffer.shape)))
                continue
            buffer.normal_(
                mean, 0.2 if buffer.dim() else abs(0.2 * mean)
            )  # a number alone may be a limit near zero


def persistent_buffers(model: torch.nn.Module) -> list[Tensor]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict(keep_vars=True)
    return [
        value
        for name, value in state.items()
        if isinstance(value, Tensor) and name not in parameters
    ]


def _with_values(model: Any, values: Mapping[str, Tensor], plain: Path) -> Any:
    plain.mkdir()
    model.config.save_pretrained(plain)
    save_file(
        {name: value.contiguous() for name, value in values.items()}, plain / "model.safetensors"
    )
    return (
        type(model).from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    )


def save(model: Any, directory: Path) -> None:
    """Write the model as transformers does, in small shards."""
    model.save_pretrained(directory, max_shard_size="40KB")


def read_weights(directory: Path) -> dict[str, Tensor]:
    return {
        name: value
        for path in sorted(directory.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def build(case: ReferenceFiles, layout: str, ddp: bool = False) -> tuple[AutoBridge, list[Any]]:
    """Bridge and model of this rank, its weights loaded."""
    bridge = AutoBridge.from_hf_pretrained(case.checkpoint)
    provider = bridge.to_megatron_provider()
    for name, value in settings(provider, LAYOUTS[layout], case.row.provider).items():
        assert hasattr(provider, name), f"a provider has no {name}"
        setattr(provider, name, value)
    return bridge, provider.provide_distributed_model(wrap_with_ddp=ddp)


def settings(
    provider: Any, layout: Mapping[str, Any], changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Layout and row's wishes, with what Megatron asks for under them."""
    merged: dict[str, Any] = {**layout, **changes}
    parallel = merged.get("tensor_model_parallel_size", 1)
    if parallel > 1 and provider.num_moe_experts:
        # training experts asks for sequence parallelism; complete experts on each rank unless the layout cuts them
        merged = {"sequence_parallel": True, "expert_tensor_parallel_size": 1, **merged}
    groups = provider.num_query_groups or provider.num_attention_heads
    if groups % parallel:
        merged.setdefault("make_query_groups_divisible_by", parallel)
    return merged


def forward_backward(model: list[Any], ids: Tensor, labels: Tensor) -> Tensor | None:
    """Run a step over [rows, sequence], one row a microbatch, finish gradients, and return the last stage's logits."""
    logits_of_rows: list[Tensor] = []
    positions = torch.arange(ids.shape[1])[None]
    config = unwrap(model[0]).config
    config.finalize_model_grads_func = finalize_model_grads
    config.moe_aux_loss_coeff = 0.0  # of the built copy only: the loss here has no further terms

    def step(rows: Iterator[int], chunk: Any) -> tuple[Tensor, Any]:
        row = next(rows)

        def loss(logits: Tensor) -> tuple[Tensor, dict[str, Any]]:
            logits_of_rows.append(
                tensor_parallel.gather_from_tensor_model_parallel_region(logits.detach().clone())
            )
            losses = tensor_parallel.vocab_parallel_cross_entropy(
                logits.transpose(0, 1).contiguous(), labels[row][:, None]
            )
            return losses.mean(), {}

        return chunk(input_ids=ids[row][None], position_ids=positions, attention_mask=None), loss

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(range(len(ids))) for _ in model],
        model=model,
        num_microbatches=len(ids),
        seq_length=ids.shape[1],
        micro_batch_size=1,
        forward_only=False,
    )
    return torch.cat(logits_of_rows) if logits_of_rows else None


def gradients_for_weights(model: list[Any]) -> None:
    """Put each parameter's gradient in its place, so that an export maps the gradients back."""
    with torch.no_grad():
        for chunk in map(unwrap, model):
            for parameter in chunk.parameters():
                gradient = getattr(parameter, "main_grad", None)  # a frozen one has none
                parameter.zero_() if gradient is None else parameter.copy_(gradient)
            for buffer in persistent_buffers(chunk):
                buffer.zero_()


def numbers_and_bytes(case: ReferenceFiles, layout: str, output: Path) -> list[str]:
    """Runs on every rank: what differs from the reference under ``layout``, one line each."""
    return numbers_and_bytes_of(*build(case, layout, ddp=True), case, output)


def numbers_and_bytes_of(
    bridge: AutoBridge, model: list[Any], case: ReferenceFiles, output: Path
) -> list[str]:
    """The same of a model that was built; its weights are its gradients afterwards."""
    bridge.save_hf_pretrained(model, output, show_progress=False)
    problems = different_files(case, output)
    rank = parallel_state.get_data_parallel_rank()
    size = parallel_state.get_data_parallel_world_size()
    ids, labels = (part[rank::size] for part in case.batch)
    logits = forward_backward(model, ids, labels)
    if logits is not None:
        problems += different_logits(case.logits[rank::size], logits)
    config = unwrap(model[0]).config
    if problems and (config.hidden_dropout or config.attention_dropout):
        problems.append(
            f"row {case.row.name} has dropout, and numbers are random: set its keys to 0.0"
        )
    gradients_for_weights(model)
    gradients: dict[str, Tensor] = dict(
        cast(Any, bridge.export_hf_weights(model, show_progress=False))
    )
    for copied in bridge.plan(model).ties:
        del gradients[copied]  # stored a second time, and the same tensor to us
    problems += different_gradients(case, gradients)
    return problems


def different_logits(expected: Tensor, logits: Tensor) -> list[str]:
    """A line if two logits are further apart than they may be."""
    error = distance(expected, logits[..., : expected.shape[-1]], expected.std())
    return (
        []
        if error <= LOGITS
        else [f"logits differ by {error:.1e} of their deviation (at most {LOGITS:.0e})"]
    )


def different_gradients(case: ReferenceFiles, gradients: Mapping[str, Tensor]) -> list[str]:
    """A line for each tensor whose gradient is not transformers'; what it does not have must have none."""
    expected = case.gradients
    # a gradient that is zero in theory is rounding noise: as far as that goes, judge it by the others' size
    floor = (
        1e-3 * torch.stack([value.square().mean().sqrt() for value in expected.values()]).median()
    )
    problems = [f"gradient of {name} is missing" for name in expected.keys() - gradients.keys()]
    for name, gradient in gradients.items():
        expected_gradient = expected.get(name, torch.zeros_like(gradient))
        if expected_gradient.shape != gradient.shape:
            problems.append(
                f"gradient of {name} is {list(gradient.shape)}, not {list(expected_gradient.shape)}"
            )
            continue
        error = distance(
            expected_gradient,
            gradient,
            torch.maximum(expected_gradient.square().mean().sqrt(), floor),
        )
        if error > GRADIENTS:
            problems.append(
                f"gradient of {name} differs by {error:.1e} of its size (at most {GRADIENTS:.0e})"
            )
    return problems


def distance(expected: Tensor, actual: Tensor, scale: Tensor) -> float:
    """Largest difference over ``scale``; infinite where a number is not finite."""
    error = ((actual - expected).abs().max() / scale).item()
    return float("inf") if isnan(error) else error


def different_files(case: ReferenceFiles, exported: Path) -> list[str]:
    """A line for each file that is not the source's, with the tensors in which it differs."""
    values = case.values
    if values is not None:
        return different_tensors(values, read_weights(exported))
    names = {path.name for directory in (case.checkpoint, exported) for path in directory.iterdir()}
    return [
        line
        for name in sorted(names - {RECORD})
        for line in _different_file(case.checkpoint / name, exported / name)
    ]


def _different_file(source: Path, exported: Path) -> list[str]:
    if not (source.exists() and exported.exists()):
        return [f"{source.name} is {'missing' if source.exists() else 'new'}"]
    if source.read_bytes() == exported.read_bytes():
        return []
    if source.suffix != ".safetensors":
        return [f"{source.name} differs{_different_keys(source, exported)}"]
    with safe_open(source, "pt") as source_file, safe_open(exported, "pt") as exported_file:
        problems = (
            []
            if source_file.metadata() == exported_file.metadata()
            else [f"metadata is {exported_file.metadata()}"]
        )
    problems += different_tensors(load_file(source), load_file(exported)) or [
        "same tensors, laid out differently"
    ]
    return [f"{source.name}: {problem}" for problem in problems]


def _different_keys(source: Path, exported: Path) -> str:
    if source.suffix != ".json":
        return ""
    source_json, exported_json = (json.loads(path.read_text()) for path in (source, exported))
    keys = [
        key
        for key in source_json.keys() | exported_json.keys()
        if source_json.get(key) != exported_json.get(key)
    ]
    return " in " + ", ".join(
        f"{key}: {source_json.get(key)!r} is now {exported_json.get(key)!r}" for key in sorted(keys)
    )


def different_tensors(source: Mapping[str, Tensor], exported: Mapping[str, Tensor]) -> list[str]:
    """A line for each tensor that is missing, new, or not the same number by number."""
    problems = [f"{name} is missing" for name in sorted(source.keys() - exported.keys())]
    problems += [f"{name} is new" for name in sorted(exported.keys() - source.keys())]
    for name in sorted(source.keys() & exported.keys()):
        source_tensor = source[name]
        exported_tensor = exported[name]
        if (source_tensor.shape, source_tensor.dtype) != (
            exported_tensor.shape,
            exported_tensor.dtype,
        ):
            problems.append(
                f"{name} is {list(exported_tensor.shape)} {exported_tensor.dtype}, not "
                f"{list(source_tensor.shape)} {source_tensor.dtype}"
            )
        elif not torch.equal(source_tensor, exported_tensor):
            worst = (source_tensor.float() - exported_tensor.float()).abs().max().item()
            problems.append(
                f"{name} differs in {(source_tensor != exported_tensor).sum()} of "
                f"{source_tensor.numel()} numbers, by up to {worst:.1e}"
            )
    return problems
