# SPDX-License-Identifier: Apache-2.0
"""Memory, speed and links of the GPUs that recipes name, from NVIDIA's data sheets."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.bridge.autotune.efficiency import EFFICIENCY, Efficiency
from megatron.bridge.backends.hardware.device_flops import BF16_TFLOPS
from megatron.bridge.utils import strict_json
from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Gpu:
    """A type of GPU. Rates are per second; links count one direction."""

    memory: int  # bytes, from the data sheet
    bf16: float  # peak operations per second of dense bf16 matrix products
    fp8: float  # the same in FP8; 0 if the GPU has none
    fp4: float  # the same in FP4; 0 if the GPU has none
    bandwidth: float  # bytes per second of its memory
    nvlink: float  # bytes per second to the other GPUs of its NVLink domain
    network: float  # bytes per second of its network adapter
    domain: int = 8  # GPUs that NVLink connects
    efficiency: Efficiency = EFFICIENCY["Hopper"]


def _read_gpu(
    name: str,
    *,
    efficiency: str,
    memory: int,
    fp8: float = 0,
    fp4: float = 0,
    bandwidth: float,
    nvlink: int,
    network: int,
    domain: int = 8,
) -> Gpu:
    """Return the GPU of a row of ``gpus.yaml``, which explains the columns and their units."""
    bf16 = BF16_TFLOPS[name.split(maxsplit=1)[0]] * 1e12
    return Gpu(
        memory=memory * 10**9,
        bf16=bf16,
        fp8=fp8 * bf16,
        fp4=fp4 * bf16,
        bandwidth=bandwidth * 1e12,
        nvlink=nvlink * 1e9,
        network=network * 1e9,
        domain=domain,
        efficiency=EFFICIENCY[efficiency],
    )


GPUS: dict[str, Gpu] = {
    name: _read_gpu(name, **row) for name, row in yaml_text.tables_beside(__file__).items()
}


def gpu(name: str) -> Gpu:
    return GPUS[gpu_name(name)]


def gpu_name(name: str) -> str:
    """Return the full name in the table for ``name``, which may omit the memory size and ignores case.

    Example:
        >>> gpu_name("h100"), gpu_name("A100 40GB")
        ('H100 80GB', 'A100 40GB')
    """
    wanted = name.lower()
    if found := [known for known in GPUS if known.lower() == wanted]:
        return found[0]
    found = [known for known in GPUS if known.lower().split()[0] == wanted]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"GPU {name!r} matches {', '.join(found)}: give the full name")
    raise UserError(
        f"GPU {name!r} is not in the table{did_you_mean(name, GPUS)}; known: {', '.join(GPUS)}"
    )


_CLUSTER = {"memory": 1e9, "nvlink": 1e9, "network": 1e9, "domain": 1}
"""Keys of a cluster file that replace the values of its GPU, and their units."""


def read_cluster(path: Path) -> tuple[str, int | None]:
    """Return the name and the number of the GPUs in a cluster file, and add its values to the table under that name.

    The file contains ``{"gpu": "h100", "gpus": 1024, "network": 25}``: GB, and GB/s in one direction.
    """
    cluster = strict_json.read(path)
    known = ("gpu", "gpus", *_CLUSTER)
    if not isinstance(cluster, dict) or "gpu" not in cluster:
        raise UserError(f'--cluster {path}: write {{"gpu": "h100", "gpus": 1024, "network": 50}}')
    for key, value in cluster.items():
        if key not in known:
            raise UserError(
                f"--cluster {path} has the key {key}{did_you_mean(key, known)}; known: {', '.join(known)}"
            )
        if key != "gpu" and (type(value) not in (int, float) or value <= 0):
            raise UserError(f"--cluster {path}: {key}={value!r} is not a number above 0")
    values: dict[str, Any] = {
        key: cluster[key] * unit for key, unit in _CLUSTER.items() if key in cluster
    }
    GPUS[path.stem] = replace(gpu(cluster["gpu"]), **values)
    return path.stem, cluster.get("gpus")
