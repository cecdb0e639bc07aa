# SPDX-License-Identifier: Apache-2.0
"""Hugging Face to a Megatron checkpoint, for a model whose attention heads do not split evenly.

usage: import_model.py HUGGING_FACE_DIR MEGATRON_DIR DIVISOR

``megatron-bridge convert import`` does the same for any other model. SmolLM2-135M has 9 heads in 3 groups, which
do not split over two processes: a group of zero heads makes it 12 in 4. They output zero and their gradients are
zero, so the model computes what it did, and an export leaves them out.
"""

import sys

from megatron.bridge import AutoBridge


def main() -> None:
    """Convert, with groups of heads that divide by DIVISOR."""
    source, target, divisor = sys.argv[1:]
    bridge = AutoBridge.from_hf_pretrained(source)
    provider = bridge.to_megatron_provider()
    provider.make_query_groups_divisible_by = int(divisor)
    bridge.save_megatron_model(provider.provide_distributed_model(wrap_with_ddp=False), target)


if __name__ == "__main__":
    main()
