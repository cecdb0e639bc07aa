# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge convert``: Hugging Face to Megatron."""

import argparse

from megatron.bridge.checkpoint import paths
from megatron.bridge.cli.support import model_options
from megatron.bridge.models.hf_pretrained import hub
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError


def run(args: argparse.Namespace) -> int:
    # before anything slow is imported
    hub.refuse_adapter_beside_weights(args.hf_model, ignored=args.adapter == "none")
    sizes = model_options.parallel_sizes(args)
    if hub.is_hf_model(args.megatron_path):
        raise UserError(
            f"--megatron-path {args.megatron_path} is a Hugging Face model: choose another folder"
        )
    paths.refuse_used(args.megatron_path)
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(
        args.hf_model,
        trust_remote_code=args.trust_remote_code,
        dtype=args.dtype,
        strip_prefix=args.strip_prefix,
        adapter=args.adapter,
    )
    provider = bridge.to_megatron_provider(load_weights=False)
    model_options.set_parallel_sizes(provider, sizes)
    bridge.save_megatron_checkpoint(provider, args.megatron_path, not args.no_progress)
    console().print(f"Megatron checkpoint: {args.megatron_path}")
    return 0
