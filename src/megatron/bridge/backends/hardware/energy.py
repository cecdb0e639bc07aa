# SPDX-License-Identifier: Apache-2.0
"""The energy that a GPU has used, as counted by its driver.

The driver contains NVML, a C library; the three functions that are needed here are called without a Python package.
"""

import ctypes
from typing import Any

import torch

from megatron.bridge.utils.errors import UserError

LIBRARY = "libnvidia-ml.so.1"


class EnergyMeter:
    def __init__(self, library: Any, uuid: str) -> None:
        self._library = library
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._device))
        self.joules()  # fail here instead of after the first steps

    def joules(self) -> float:
        """Read the energy since the driver was loaded; GPUs before Volta have no counter, which is a ``UserError``."""
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            raise UserError(
                f"logger.log_energy=True, but the driver's {function} fails with code {code}: set "
                "logger.log_energy=false on this GPU"
            )


def energy_meter() -> EnergyMeter:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise UserError(
            f"logger.log_energy=True needs NVIDIA's driver with {LIBRARY}: set logger.log_energy=false"
        ) from error
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return EnergyMeter(library, f"GPU-{device.uuid}")
