# SPDX-License-Identifier: Apache-2.0
"""``check_family``: one row, everything that is proven of a family."""

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator
from datetime import timedelta
from math import lcm
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from megatron.core import parallel_state
from torch import multiprocessing

from megatron.bridge import AutoBridge
from megatron.bridge.testing import reference
from megatron.bridge.testing.reference import LAYOUTS, Case, ReferenceFiles
from megatron.bridge.testing.row import Row
from megatron.bridge.utils.errors import UserError


def check_family(row: Row, layouts: Iterable[str] | None = None) -> None:
    """Prove that the bridge of a row's architecture converts exactly; computes on the CPU.

    Logits within 1e-4 of their standard deviation and gradients within 1e-3 of their size of what transformers
    computes; every byte of a checkpoint back; an export without a source that transformers loads; the config in
    both directions. Then numbers and bytes again under each layout.

    Args:
        row: the tiny model.
        layouts: names in ``reference.LAYOUTS``; those of the row when None. Each runs in as many new processes as
            it needs, so a script that calls this needs ``if __name__ == "__main__":``.

    Raises:
        AssertionError: something differs; one line for each difference.
        UserError: there is a GPU, or no layout of that name.
    """
    if torch.cuda.is_available():
        raise UserError(
            "check_family compares float32 on the CPU: run it with CUDA_VISIBLE_DEVICES= (empty)"
        )
    names = [*row.layouts, *row.slow, *row.four] if layouts is None else list(layouts)
    if unknown := sorted(set(names) - set(LAYOUTS)):
        raise UserError(f"layouts={', '.join(unknown)} must be among {', '.join(LAYOUTS)}")
    with tempfile.TemporaryDirectory() as folder:
        case = reference.make_reference(row, Path(folder) / "reference")
        problems = [*on_one_process(case, Path(folder))]
        for name in names if not problems else ():
            problems += [
                f"{name}: {line}" for line in _on_processes(case, name, Path(folder) / name)
            ]
    assert not problems, "\n".join(problems)


def on_one_process(case: Case, folder: Path) -> Iterator[str]:
    """What differs, one line each, before any layout."""
    yield from reference.numbers_and_bytes(case, "one", folder / "one")
    yield from export_without_a_source(case, folder / "new")
    yield from config_in_both_directions(AutoBridge.from_hf_pretrained(case.checkpoint))
    yield from padding_rows(case.row)


def padding_rows(row: Row) -> Iterator[str]:
    """A line if the bridge takes another row than transformers for the one without gradients from inputs."""
    token = 0
    config = _model_class(row).config_class(**{**row.config, "pad_token_id": token})
    config.architectures = [_model_class(row).__name__]
    bridge = AutoBridge.from_hf_config(config)
    built = bridge.to_megatron_provider(load_weights=False).embedding_padding_idx
    if (expected := padding_row(row, token)) != built:
        yield (
            f"with pad_token_id={token}, transformers' embedding has padding_idx={expected}, and the provider has "
            f"embedding_padding_idx={built}: set has_padding_row={expected is not None} in the bridge"
        )


def padding_row(row: Row, token: int) -> int | None:
    """Return the ``padding_idx`` of transformers' embedding in the row's model with ``pad_token_id=token``."""
    model_class = _model_class(row)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**{**row.config, "pad_token_id": token}))
    return model.get_input_embeddings().padding_idx


def _model_class(row: Row) -> Any:
    return getattr(transformers, row.model) if isinstance(row.model, str) else row.model


def config_in_both_directions(bridge: AutoBridge) -> list[str]:
    """A line for each attribute that a provider loses when it is written as a config and read again."""
    provider = bridge.to_megatron_provider(load_weights=False)
    written = type(bridge.hf_config)(**bridge._bridge.megatron_to_hf_config(provider))
    return different_providers(
        provider, AutoBridge.from_hf_config(written).to_megatron_provider(load_weights=False)
    )


def different_providers(built: Any, read_again: Any) -> list[str]:
    """A line for each declared attribute in which two providers differ."""
    return [
        f"provider.{field.name}={getattr(built, field.name)!r} is {getattr(read_again, field.name)!r} when read again"
        for field in dataclasses.fields(built)
        if field.compare and getattr(built, field.name) != getattr(read_again, field.name)
    ]


def export_without_a_source(case: ReferenceFiles, output: Path) -> list[str]:
    """What transformers makes of an export that knows only the config."""
    return export_without_a_source_of(*reference.build(case, "one"), case, output)


def export_without_a_source_of(
    bridge: AutoBridge, model: list[Any], case: ReferenceFiles, output: Path
) -> list[str]:
    AutoBridge.from_hf_config(bridge.hf_config).save_hf_pretrained(
        model, output, show_progress=False
    )
    return _not_as_in_transformers(case, output)


def _not_as_in_transformers(case: ReferenceFiles, path: Path) -> list[str]:
    auto: Any = transformers.AutoModelForCausalLM
    attention = case.row.attention
    hf, loading = auto.from_pretrained(
        path, attn_implementation=attention, output_loading_info=True
    )
    layers = hf.config.num_hidden_layers
    # layers of multi-token prediction come after the others; transformers has no modules for them
    beyond = {name for name in loading["unexpected_keys"] if f"layers.{layers}." in name}
    differences = {**loading, "unexpected_keys": loading["unexpected_keys"] - beyond}
    problems = [
        f"transformers loads an export without a source with {k}: {v}"
        for k, v in differences.items()
        if v
    ]
    with torch.no_grad():
        logits = hf.eval()(input_ids=case.batch[0], use_cache=False).logits
    same = torch.equal(logits, case.logits)
    return (
        problems
        if same
        else [*problems, "transformers computes other logits of an export without a source"]
    )


def _on_processes(case: Case, layout: str, folder: Path) -> list[str]:
    """What is wrong under one layout, in as many processes as it takes."""
    folder.mkdir()
    size = 2 if layout == "dp2" else lcm(*_rank_counts(LAYOUTS[layout]))
    bridge = type(AutoBridge.from_hf_pretrained(case.checkpoint)._bridge)
    multiprocessing.spawn(_run_rank, (size, case, layout, folder, bridge), nprocs=size)  # type: ignore[attr-defined]
    return list(
        dict.fromkeys(
            line
            for rank in range(size)
            for line in (folder / f"problems-{rank}").read_text().splitlines()
        )
    )


def _rank_counts(layout: dict[str, Any]) -> tuple[int, int]:
    stages = layout.get("pipeline_model_parallel_size", 1)
    tensor = layout.get("tensor_model_parallel_size", 1)
    experts = layout.get("expert_model_parallel_size", 1) * layout.get(
        "expert_tensor_parallel_size", tensor
    )
    return stages * tensor, stages * experts


def _run_rank(rank: int, size: int, case: Case, layout: str, folder: Path, bridge: type) -> None:
    """One process; that it was given ``bridge`` imported the module that registers it."""
    del bridge
    torch.set_num_threads(1)
    process_group = {"init_method": f"file://{folder}/ranks", "timeout": timedelta(minutes=10)}
    dist.init_process_group("gloo", rank=rank, world_size=size, **process_group)
    problems = reference.numbers_and_bytes(case, layout, folder / "out")
    (folder / f"problems-{rank}").write_text("\n".join(problems))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
