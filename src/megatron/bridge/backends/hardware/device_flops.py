# SPDX-License-Identifier: Apache-2.0
"""Peak FLOP/s of GPUs."""

from megatron.bridge.utils.config import yaml_text

BF16_TFLOPS: dict[str, float] = yaml_text.tables_beside(__file__)


def bf16_tflops(name: str) -> float | None:
    """Return the peak TFLOP/s of a GPU by its device name, or None if it is not in the table.

    Example:
        >>> bf16_tflops("NVIDIA A100-SXM4-40GB"), bf16_tflops("NVIDIA H100 PCIe")
        (312.0, 756.0)
        >>> bf16_tflops("Quadro K620")
    """
    words = set(name.replace("-", " ").split())
    known = [entry for entry in BF16_TFLOPS if words.issuperset(entry.split())]
    return BF16_TFLOPS[max(known, key=len)] if known else None


def device_tflops() -> float | None:
    """Return the peak TFLOP/s of this process's GPU; None without a GPU or if it is not in the table."""
    import torch  # the table is read without it

    return bf16_tflops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
