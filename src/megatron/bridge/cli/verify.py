# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge verify``: prove that a Megatron checkpoint equals a Hugging Face model."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.bridge.checkpoint import paths
from megatron.bridge.cli.support import logits, model_options
from megatron.bridge.cli.support.options import (
    add_no_adapter,
    add_no_progress,
    add_parallel_sizes,
    add_trust_checkpoint,
)
from megatron.bridge.cli.support.output_files import JsonFile
from megatron.bridge.cli.support.parser import Parser, location, location_path
from megatron.bridge.models.hf_pretrained import hub
from megatron.bridge.utils.console import console, track
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.models.conversion.check.certificate import Certificate
    from megatron.bridge.models.conversion.check.compare_logits import LogitComparison

_SHOWN = 5


DESCRIPTION = (
    "Compare every tensor bit for bit, and the logits of both models on the same tokens. Write "
    "the result, with a hash of each tensor, as a JSON certificate. The exit code is 1 if "
    "anything differs. A quantized tensor may also hold the values of the checkpoint rounded to "
    "nearest, of which the certificate says so."
)
EXAMPLES = r"""example:
  megatron-bridge verify --hf-model HuggingFaceTB/SmolLM2-135M --megatron-path checkpoints/smollm2 \
      --certificate smollm2.json
"""


class CertificateFile(JsonFile):
    """The certificate that ``verify`` writes."""

    keys = ("holds", "tensors")


def add_arguments(parser: Parser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.add_argument("--hf-model", type=location, metavar="ID", help="model directory or hub id")
    parser.add_argument(
        "--megatron-path",
        type=location_path,
        metavar="DIR",
        help="checkpoint directory, or one iteration in it",
    )
    parser.add_options_of_words("--hf-model", "--megatron-path")
    add_no_adapter(parser)
    parser.add_argument(
        "--certificate",
        type=CertificateFile,
        metavar="FILE",
        help="write the certificate to this file",
    )
    parser.add_argument(
        "--skip-logits",
        action="store_true",
        help="compare only the tensors, a few in memory at a time",
    )
    add_no_progress(parser)
    add_parallel_sizes(parser)
    add_trust_checkpoint(parser)


def run(args: argparse.Namespace) -> int:
    if args.hf_model is None or args.megatron_path is None:
        raise UserError(
            "verify compares a model with a checkpoint: give --hf-model ID and --megatron-path DIR"
        )
    # before anything slow is imported
    hub.refuse_adapter_beside_weights(args.hf_model, ignored=args.adapter == "none")
    paths.resolve(args.megatron_path)
    if args.certificate:
        _check_target(args.certificate)
    sizes = model_options.parallel_sizes(args)
    from megatron.bridge import AutoBridge
    from megatron.bridge.utils import distributed

    bridge = AutoBridge.from_hf_pretrained(
        args.hf_model, trust_remote_code=args.trust_remote_code, adapter=args.adapter
    )
    certificate = _certificate(bridge, args, sizes)
    if distributed.rank() == 0:
        _report(certificate)
        if args.certificate:
            args.certificate.write_text(json.dumps(certificate.as_dict(), indent=2) + "\n")
    return 0 if certificate.holds else 1


def _check_target(path: Path) -> None:
    if not path.parent.is_dir():
        raise UserError(f"--certificate {path} cannot be written: create its folder first")
    if path.is_dir():
        raise UserError(f"--certificate {path} is a folder: give a file name")


def _certificate(bridge: Any, args: argparse.Namespace, sizes: dict[str, Any]) -> "Certificate":
    from megatron.bridge.models.conversion.check.certificate import Certificate, prove
    from megatron.bridge.models.conversion.engine import stored_provider
    from megatron.bridge.models.conversion.mappings import patterns

    def load(**options: Any) -> list[Any]:
        return bridge.load_megatron_model(
            args.megatron_path, mp_overrides=sizes, wrap_with_ddp=False, **options
        )

    model = None
    if args.skip_logits:
        weights = bridge.export_stored_weights(args.megatron_path, mp_overrides=sizes)
    else:
        model = load()
        weights = bridge.export_hf_weights(model, cpu=True, show_progress=False)
    source = bridge.hf_pretrained.state
    compared = track(weights, "Comparing", total=len(source), show=not args.no_progress)
    proofs, missing = prove(compared, source)
    expected = bridge.not_converted(stored_provider.read_for_layout(args.megatron_path, sizes))
    missing = tuple(
        name
        for name in missing
        if not any(patterns.match(pattern, name) is not None for pattern in expected)
    )
    compared, tolerance = None, 0.0
    # the logits of rounded weights differ by what rounding costs, which is no error
    if model is not None and not any(proof.quantized for proof in proofs.values()):
        compared, tolerance = _logits(bridge, model, lambda: load(bf16=False, fp16=False))
    return Certificate(
        hf_model=args.hf_model,
        megatron=str(args.megatron_path),
        tensors=proofs,
        missing=missing,
        logits=compared,
        tolerance=tolerance,
    )


def _logits(
    bridge: Any, model: list[Any], in_float32: Callable[[], list[Any]]
) -> "tuple[LogitComparison, float]":
    from megatron.bridge.models.conversion.check import compare_logits

    ids, _ = logits.tokens(bridge, None)

    def outputs(chunks: list[Any]) -> Any:
        for chunk in chunks:
            chunk.eval()
        return compare_logits.run_megatron(chunks, ids)

    return logits.judged(bridge, ids, outputs(model), in_float32=lambda: outputs(in_float32()))[1:]


def _report(certificate: "Certificate") -> None:
    terminal = console()
    for finding, names in (
        ("differs", certificate.different),
        ("is not in the model", certificate.missing),
        ("has values that are NaN or infinite", certificate.not_finite),
    ):
        for name in names[:_SHOWN]:
            terminal.print(f"tensor {name} {finding}")
        if len(names) > _SHOWN:
            terminal.print(f"... and {len(names) - _SHOWN} more")
    rounded = len(certificate.quantized)
    equal = len(certificate.tensors) - len(certificate.different) - rounded
    terminal.print(
        f"{equal} of {len(certificate.tensors) + len(certificate.missing)} tensors are bitwise equal"
        f"{f', {rounded} hold the values of the model rounded to nearest' if rounded else ''}"
    )
    if certificate.logits is not None:
        terminal.print(
            f"largest difference of logits: {certificate.logits.relative:.3g} of their standard deviation "
            f"(tolerance {certificate.tolerance:g})"
        )
    verdict = "the same model, quantized" if rounded else "the same model"
    terminal.print(f"verified: {verdict}" if certificate.holds else "NOT the same model")
