# SPDX-License-Identifier: Apache-2.0
"""What the scripts of ``examples/conversion`` do: proven round trips, and logits side by side."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megatron.bridge.cli import convert, export, words

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.bridge.models.conversion.verify import Activations, LogitReport

PROMPT = "The quick brown fox jumps over the lazy dog, and then it"
# largest difference of two logits over their standard deviation; half precision rounds to 3 digits
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}


def convert_checkpoints(argv: Sequence[str]) -> int:
    """``import`` and ``export``; without either, options alone mean ``import``."""
    parser = words.Parser(
        description="Convert a checkpoint between Hugging Face and Megatron format, bit for bit.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in (("import", convert), ("export", export)):
        subparser = commands.add_parser(name, help=command.__doc__)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    arguments = list(argv)
    if arguments and arguments[0].startswith("--") and arguments[0] != "--help":
        arguments.insert(0, "import")
    args = parser.parse_args(arguments)
    return args.run(args)


def roundtrip(argv: Sequence[str]) -> int:
    """Hugging Face -> Megatron -> Hugging Face, every tensor compared bit for bit with the source."""
    parser = words.Parser(description=roundtrip.__doc__)
    convert.add_model_arguments(parser, "--model-name", "--hf-model-id")
    parser.add_argument("--output-dir", type=Path, help="also write the Hugging Face model here")
    args = parser.parse_args(argv)

    from megatron.bridge import AutoBridge

    sizes = convert.layout(args)
    bridge = AutoBridge.from_hf_pretrained(args.hf_model, trust_remote_code=args.trust_remote_code)
    model = convert.build_model(bridge, sizes)
    if args.output_dir:
        bridge.save_hf_pretrained(model, args.output_dir)
    return _report_round_trip(bridge, model, args.hf_model)


def _report_round_trip(bridge: Any, model: Any, name: str) -> int:
    from rich.table import Column, Table

    from megatron.bridge.models.conversion.certificate import prove
    from megatron.bridge.utils.console import console

    weights = bridge.export_hf_weights(model, cpu=True, show_progress=False)
    proofs, _ = prove(weights, bridge.hf_pretrained.state)
    table = Table(Column("tensor", overflow="fold"), "shape", "dtype", "bitwise equal", title=name)
    for tensor, proof in proofs.items():
        table.add_row(tensor, "x".join(map(str, proof.shape)), proof.dtype, "yes" if proof.equal else "NO")
    different = [tensor for tensor, proof in proofs.items() if not proof.equal]
    numbers = sum(prod(proof.shape) for proof in proofs.values())
    console().print(table)
    if different:
        console().print(f"{len(different)} of {table.row_count} tensors differ, first {different[0]}")
        return 1
    console().print(f"{table.row_count} tensors, {numbers:,} numbers: all bitwise equal")
    return 0


def compare_models(argv: Sequence[str]) -> int:
    """Logits of transformers and of Megatron side by side; where they differ, the layer where they part."""
    parser = words.Parser(description=compare_models.__doc__)
    convert.add_model_arguments(parser, "--hf-model-path", "--model-name")
    parser.add_argument("--megatron-path", type=Path, help="take Megatron's weights from this checkpoint instead")
    parser.add_argument("--prompt", help="text to run (default: a sentence, or random tokens without a tokenizer)")
    parser.add_argument("--dtype", choices=convert.DTYPES, default="float32", help="dtype of both models")
    parser.add_argument("--tolerance", type=float, help="largest difference over the logits' standard deviation")
    args = parser.parse_args(argv)

    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion import verify

    sizes = convert.layout(args)
    bridge = AutoBridge.from_hf_pretrained(
        args.hf_model, trust_remote_code=args.trust_remote_code, dtype=args.dtype
    )
    ids, tokenizer = tokens(bridge, args.prompt)
    if args.megatron_path:
        options = {"bf16": args.dtype == "bfloat16", "fp16": args.dtype == "float16", "wrap_with_ddp": False}
        model = bridge.load_megatron_model(args.megatron_path, mp_overrides=sizes, **options)
    else:
        model = convert.build_model(bridge, sizes)
    for chunk in model:
        chunk.eval()
    found = verify.run_megatron(model, ids)
    reference = reference_activations(bridge, ids)
    report = verify.compare(reference, found)
    tolerance = tolerance_of(args.dtype) if args.tolerance is None else args.tolerance
    return _report_logits(report, tolerance, reference, found, tokenizer)


def tolerance_of(dtype: Any) -> float:
    """How far logits may be apart in a dtype, or its name; None is float32, in which such a model is built."""
    return TOLERANCES[str(dtype or "float32").removeprefix("torch.")]


def tokens(bridge: Any, prompt: str | None) -> "tuple[Tensor, Any]":
    """(token ids [1, sequence], tokenizer or None)."""
    import torch

    from megatron.bridge.utils.console import console
    from megatron.bridge.utils.errors import UserError

    if bridge.carried:
        raise UserError(
            f"logits of {bridge.hf_config.architectures[0]} cannot be compared, for only its text is converted: "
            "compare its tensors with `megatron-bridge verify --skip-logits`"
        )
    try:
        tokenizer = bridge.hf_pretrained.tokenizer
        ids = tokenizer(prompt or PROMPT, return_tensors="pt").input_ids
    except (OSError, ValueError, KeyError, ImportError):
        tokenizer, ids = None, torch.empty(1, 0)
    if ids.numel():  # transformers makes some an empty tokenizer where there are no files
        return ids, tokenizer
    if prompt is not None:
        raise UserError(f"--prompt needs a tokenizer and {bridge.hf_pretrained.directory} has none")
    console().print("no tokenizer: running 32 random tokens")
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, bridge.hf_config.vocab_size, (1, 32), generator=generator), None


def reference_activations(bridge: Any, ids: "Tensor") -> "Activations":
    """What transformers computes for the tokens."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from megatron.bridge.models.conversion import verify
    from megatron.bridge.utils.console import console

    if not console().is_terminal:
        cast(Any, logging).disable_progress_bar()  # a line for each update in a log
    pretrained = bridge.hf_pretrained
    hf = AutoModelForCausalLM.from_pretrained(
        pretrained.state.directory,
        dtype=pretrained.config.dtype or torch.float32,
        trust_remote_code=pretrained.trust_remote_code,
    )
    device = torch.cuda.current_device()
    model: Any = hf.eval()
    return verify.run_hf(model.to(device), ids.to(device))


def _report_logits(
    report: "LogitReport", tolerance: float, reference: "Activations", found: "Activations", tokenizer: Any
) -> int:
    from rich.table import Table

    from megatron.bridge.utils.console import console

    def named(token: int) -> str:
        return f"{token} {tokenizer.decode([token])!r}" if tokenizer else str(token)

    terminal = console()
    last = reference.logits[0, -1].float()
    other = found.logits[0, -1].float()
    table = Table("next token", "Hugging Face", "Megatron", "difference", title="logits at the last position")
    for token in last.topk(5).indices.tolist():
        values = float(last[token]), float(other[token])
        table.add_row(named(token), *(f"{value:.5f}" for value in (*values, values[1] - values[0])))
    terminal.print(table)
    row, position, token = report.worst
    terminal.print(
        f"largest difference {report.largest:.3g}, {report.relative:.3g} of the deviation {report.scale:.3g}: "
        f"position {position} of row {row}, token {named(token)}, {report.pair[0]:.5f} and {report.pair[1]:.5f}"
    )
    terminal.print(
        f"smallest cosine similarity {report.cosine:.7f}; same next token at {report.same_choice:.1%} of positions"
    )
    if report.relative <= tolerance:
        terminal.print(f"the models agree (tolerance {tolerance:g})")
        return 0
    layers = Table("output of", "largest difference / deviation", title="where they part")
    for name, value in report.layers.items():
        layers.add_row(name, f"{value:.3g}")
    terminal.print(layers)
    terminal.print(f"the models differ (tolerance {tolerance:g})")
    return 1
