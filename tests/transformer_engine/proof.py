# SPDX-License-Identifier: Apache-2.0
"""Families with ``backend='transformer_engine'``: logits, gradients and bytes against transformers' own models.

usage: python -m tests.transformer_engine.proof OUTPUT CHECK:ROW ...

Needs ``scripts/extra.sh te``. CHECK is a layout, or ``stored`` (checkpoints of either backend are read by the
other), or ``lora`` or ``lora-LAYOUT`` (the same adapters on both backends). Writes a JSON object to OUTPUT: for
each CHECK:ROW what differs, one line each, or the sentence that refuses it.
"""

import json
import sys
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.transformer_engine import extension

HERE = {"backend": "transformer_engine", "use_cpu_initialization": True}


def main(output: str, *cases: str) -> None:
    alone = [case for case in cases if case.startswith("one:")]
    together = [case for case in cases if case not in alone]
    found: dict[str, list[str]] = {}
    for size, names in ((1, alone), (2, together)):
        if names:
            with tempfile.TemporaryDirectory() as folder:
                torch.multiprocessing.spawn(run, (size, names, Path(folder)), nprocs=size)
                for path in Path(folder).glob("problems-*"):
                    for case, lines in json.loads(path.read_text()).items():
                        found[case] = sorted({*found.get(case, []), *lines})
    Path(output).write_text(json.dumps(found, indent=1))


def run(rank: int, size: int, cases: list[str], folder: Path) -> None:
    """One process: all cases, one after the other."""
    prepare()
    from tests.workers import forget_model_parallel

    torch.set_num_threads(1)
    where = {"init_method": f"file://{folder}/ranks", "timeout": timedelta(minutes=10)}
    dist.init_process_group("gloo", rank=rank, world_size=size, **where)
    found = {}
    for case in cases:
        found[case] = prove(*case.split(":"), folder / case.replace(":", "-"))
        if rank == 0:
            sys.stdout.write(f"{case}: {found[case] or 'equal'}\n")
            sys.stdout.flush()
        forget_model_parallel()
    (folder / f"problems-{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


def prepare() -> None:
    """Let this process use Transformer Engine's layers on its CPU."""
    extension.install()
    from megatron.bridge.backends.specs import layer_specs
    from tests.transformer_engine import kernels

    kernels.install()
    # it would refuse Transformer Engine where there is no CUDA device
    layer_specs.resolve_backend = lambda name="auto": (
        "transformer_engine" if name == "auto" else name
    )


def prove(check: str, name: str, folder: Path) -> list[str]:
    """What is wrong with a row under a layout, or in another check, on this rank."""
    from megatron.bridge.testing.reference import Case
    from megatron.bridge.utils.errors import UserError
    from tests.families import harness
    from tests.families.rows import ROWS

    row = ROWS[name]
    if dist.get_rank() == 0:
        harness.make_reference(row, folder)
    dist.barrier()
    case = Case(replace(row, provider={**row.provider, **HERE}), folder)
    try:
        if check == "stored":
            return stored(case, Case(row, folder))
        if check.startswith("lora"):
            return adapted(case, Case(row, folder), check.partition("-")[2] or "one")
        bridge, model = harness.build(case, check, ddp=True)
        return harness.numbers_and_bytes_of(bridge, model, case, folder / "out")
    except UserError as error:
        return [f"refused: {error}"]
    except Exception as error:  # the cells after this one are still worth running
        return [f"{type(error).__name__}: {error}"]


def stored(case: Any, of_torch: Any) -> list[str]:
    """Checkpoints of each backend, read by the other and exported."""
    from megatron.bridge.checkpoint import model_io
    from tests.families import harness

    problems = []
    built = {"te": harness.build(case, "one"), "torch": harness.build(of_torch, "one")}
    for kind, (bridge, chunks) in built.items():
        bridge.save_megatron_model(chunks, case.directory / kind)
    for kind, (bridge, chunks) in built.items():
        other = "torch" if kind == "te" else "te"
        for parameter in chunks[0].parameters():
            parameter.data.fill_(float("nan"))
        model_io.load_model(chunks, case.directory / other)
        bridge.save_hf_pretrained(chunks, case.directory / f"from-{other}", show_progress=False)
        problems += harness.different_files(case, case.directory / f"from-{other}")
    return problems


def adapted(case: Any, of_torch: Any, layout: str) -> list[str]:
    """The same names and, with the same numbers in them, the same logits."""
    from megatron.bridge.peft.lora import LoRA
    from tests.families import harness

    logits, names = [], []
    for one in (case, of_torch):
        _, chunks = harness.build(one, layout)
        LoRA(dim=4, target_modules=["linear_proj", "linear_fc1", "linear_fc2"])(chunks)
        factors = {
            name: value for name, value in chunks[0].named_parameters() if value.requires_grad
        }
        torch.manual_seed(1)
        with torch.no_grad():
            for _, factor in sorted(factors.items()):
                factor.normal_(0.0, 0.2)
        names.append({name: list(value.shape) for name, value in factors.items()})
        ids = case.batch[0]
        logits.append(
            chunks[0](
                input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], attention_mask=None
            )
        )
    problems = (
        harness.different_logits(logits[1], logits[0]) if names[0] == names[1] else ["names differ"]
    )
    unchanged = layout == "one" and not harness.different_logits(case.logits, logits[0])
    return [*problems, "the adapters change nothing"] if unchanged else problems


if __name__ == "__main__":
    main(*sys.argv[1:])
