# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge verify``: prove that a Megatron checkpoint is a Hugging Face model."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.bridge.cli import convert

if TYPE_CHECKING:
    from megatron.bridge.models.conversion.certificate import Certificate
    from megatron.bridge.models.conversion.verify import LogitReport

EXAMPLE = """example:
  megatron-bridge verify HuggingFaceTB/SmolLM2-135M checkpoints/smollm2 --certificate smollm2.json
"""
_SHOWN = 5


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``verify``."""
    parser = subparsers.add_parser(
        "verify",
        help="prove that a Megatron checkpoint equals a Hugging Face model",
        description="Compare every tensor bit for bit, and the logits of both models on the same tokens; write "
        "what was found, with a hash for each tensor, as a JSON certificate. Exit code 1 if anything differs.",
        epilog=EXAMPLE,
    )
    parser.add_argument("hf_model", metavar="HF_DIR", help="model directory or hub id")
    parser.add_argument(
        "megatron_path", metavar="MEGATRON_DIR", type=Path, help="checkpoint, or an iteration of it"
    )
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="write the certificate here")
    parser.add_argument(
        "--skip-logits", action="store_true", help="compare tensors only, a few in memory at a time"
    )
    parser.add_argument("--no-progress", action="store_true", help="draw no progress bar")
    convert.add_shared_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare, report, write the certificate."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.cli.conversion_tools import tolerance_of
    from megatron.bridge.models.conversion import patterns
    from megatron.bridge.models.conversion.certificate import Certificate, prove
    from megatron.bridge.utils import console, dist
    from megatron.bridge.utils.errors import UserError

    sizes = convert.layout(args)
    if args.certificate and not args.certificate.parent.is_dir():
        raise UserError(f"--certificate {args.certificate} cannot be written: its folder does not exist")
    if args.certificate and args.certificate.is_dir():
        raise UserError(f"--certificate {args.certificate} is a folder: give the file to write")
    bridge = AutoBridge.from_hf_pretrained(args.hf_model, trust_remote_code=args.trust_remote_code)
    model = None
    if args.skip_logits:
        weights = bridge.export_stored_weights(args.megatron_path, mp_overrides=sizes)
    else:
        model = bridge.load_megatron_model(args.megatron_path, mp_overrides=sizes, wrap_with_ddp=False)
        weights = bridge.export_hf_weights(model, cpu=True, show_progress=False)
    source = bridge.hf_pretrained.state
    compared = console.track(weights, "Comparing", total=len(source), show=not args.no_progress)
    proofs, missing = prove(compared, source)
    missing = tuple(name for name in missing if not any(patterns.match(it, name) for it in bridge.not_converted))
    certificate = Certificate(
        hf_model=args.hf_model,
        megatron=str(args.megatron_path),
        tensors=proofs,
        missing=missing,
        logits=None if model is None else _logits(bridge, model),
        tolerance=tolerance_of(bridge.hf_config.dtype),
    )
    if dist.rank() == 0:
        _report(certificate)
        if args.certificate:
            args.certificate.write_text(json.dumps(certificate.as_dict(), indent=2) + "\n")
    return 0 if certificate.holds else 1


def _logits(bridge: Any, model: list[Any]) -> "LogitReport":
    from megatron.bridge.cli.conversion_tools import reference_activations, tokens
    from megatron.bridge.models.conversion import verify

    ids, _ = tokens(bridge, None)
    for chunk in model:
        chunk.eval()
    return verify.compare(reference_activations(bridge, ids), verify.run_megatron(model, ids))


def _report(certificate: "Certificate") -> None:
    from megatron.bridge.utils.console import console

    terminal = console()
    for what, names in (("differs", certificate.different), ("is not in the model", certificate.missing)):
        for name in names[:_SHOWN]:
            terminal.print(f"tensor {name} {what}")
        if len(names) > _SHOWN:
            terminal.print(f"... and {len(names) - _SHOWN} more")
    equal = len(certificate.tensors) - len(certificate.different)
    terminal.print(f"{equal} of {len(certificate.tensors) + len(certificate.missing)} tensors are bitwise equal")
    if certificate.logits is not None:
        terminal.print(
            f"largest difference of logits: {certificate.logits.relative:.3g} of their deviation "
            f"(tolerance {certificate.tolerance:g})"
        )
    terminal.print("verified: the same model" if certificate.holds else "NOT the same model")
