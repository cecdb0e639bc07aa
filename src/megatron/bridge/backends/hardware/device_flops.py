# SPDX-License-Identifier: Apache-2.0
"""Peak FLOP/s of GPUs."""

import torch

# Dense bf16 TFLOP/s by words of the device name, from NVIDIA's data sheets: A10 and A100 (2021), A30, A40 and
# H100 PCIe (2022), GH200, L4, L40 and L40S (2023), H20, H100, H200, DGX B200 and GB200 NVL72 (2024), DGX B300
# and GB300 NVL72 (2025). Rates with sparsity, or of a whole machine, have been divided. Export versions (A800,
# H800) compute as fast as the originals.
BF16_TFLOPS: dict[str, float] = {
    "A10": 125.0,
    "A30": 165.0,
    "A40": 149.7,
    "A100": 312.0,
    "A800": 312.0,
    "L4": 121.0,
    "L40": 181.0,
    "L40S": 362.0,
    "H20": 148.0,
    "H100": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H800": 989.0,
    "H800 PCIe": 756.0,
    "H200": 989.0,
    "H200 NVL": 835.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "GB300": 2500.0,
}


def bf16_tflops(name: str) -> float | None:
    """The peak TFLOP/s of a GPU by its device name; None if it is not in the table.

    Example:
        >>> bf16_tflops("NVIDIA A100-SXM4-40GB"), bf16_tflops("NVIDIA H100 PCIe")
        (312.0, 756.0)
        >>> bf16_tflops("Quadro K620")
    """
    words = set(name.replace("-", " ").split())
    known = [entry for entry in BF16_TFLOPS if words.issuperset(entry.split())]
    return BF16_TFLOPS[max(known, key=len)] if known else None


def device_tflops() -> float | None:
    """The peak TFLOP/s of this process's GPU; None without a GPU or if it is not in the table."""
    return bf16_tflops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
