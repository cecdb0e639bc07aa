# SPDX-License-Identifier: Apache-2.0
"""Compare the measured time and memory of runs with the predictions.

The folder of a run contains its resolved config, the machine, and the time and memory of its steps.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.bridge.autotune.gpus import gpu_name
from megatron.bridge.autotune.memory import fullest_stage, memory_per_rank
from megatron.bridge.autotune.predict import predict
from megatron.bridge.autotune.profile import Profile
from megatron.bridge.autotune.search.search import candidate_of
from megatron.bridge.training.callbacks.core.run_folder import CONFIG, ENVIRONMENT
from megatron.bridge.utils import loss_curves, strict_json
from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.config.interpolation import resolve_tree
from megatron.bridge.utils.config.serialize import from_plain
from megatron.bridge.utils.errors import UserError

_WARM = 2  # the first steps are excluded: they allocate and compile


@dataclass(frozen=True)
class LedgerEntry:
    """One run: its measured and predicted step time and, on a GPU, the bytes of its fullest rank."""

    run: str
    device: str
    processes: int
    layout: str
    measured: float
    predicted: float
    measured_memory: float | None
    predicted_memory: int

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def read_entries(places: Sequence[Path], profile: Profile | None) -> Iterator[LedgerEntry | str]:
    """Yield the runs below ``places``, sorted by name, or a message for each run that cannot be compared."""
    folders = sorted({path.parent for root in places for path in root.rglob(loss_curves.METRICS)})
    if not folders:
        raise UserError(
            f"--ledger {places[0]} holds no runs: give a folder that logger.log_dir named"
        )
    for folder in folders:
        try:
            yield _read_entry(folder, profile)
        except UserError as error:
            yield f"{folder}: {error}"


def _read_entry(folder: Path, profile: Profile | None) -> LedgerEntry:
    rows = loss_curves.read_metrics(folder)
    steps = [
        row for row in rows if row["kind"] == "train" and "step time" in row and row["step"] > _WARM
    ]
    if not steps:
        raise UserError(f"it has no steps after the first {_WARM}")
    environment = _read_environment(folder)
    device = environment["gpu"]["name"] if environment["gpu"] else ""
    if not device and profile is None:
        raise UserError("it ran on a CPU: give --profile")
    name = (
        profile.device
        if profile and not device
        else gpu_name(device.replace("NVIDIA ", "").split()[0])
    )
    config = from_plain(
        resolve_tree(yaml_text.read((folder / CONFIG).read_text(), str(folder / CONFIG)))
    )
    config = config.resolve(environment["processes"]).config
    peaks = [row["peak memory GB"] * 1e9 for row in steps if device and "peak memory GB" in row]
    return LedgerEntry(
        run=str(folder),
        device=name,
        processes=environment["processes"],
        layout=candidate_of(config).label(),
        measured=statistics.median(row["step time"] for row in steps),
        predicted=predict(config, environment["processes"], name, profile=profile).seconds,
        measured_memory=max(peaks, default=None),
        predicted_memory=fullest_stage(memory_per_rank(config, environment["processes"])).total,
    )


def _read_environment(folder: Path) -> dict[str, Any]:
    files = sorted(folder.rglob(ENVIRONMENT))
    if not files or not (folder / CONFIG).is_file():
        raise UserError(f"it has no {CONFIG} or {ENVIRONMENT}")
    return strict_json.read(files[-1])


def correction(entries: Sequence[LedgerEntry]) -> float:
    """Return the median ratio of measured to predicted time."""
    return statistics.median(entry.measured / entry.predicted for entry in entries)


def spread(errors: Sequence[float]) -> str:
    """Describe the median and the 90th percentile of relative errors."""
    sizes = sorted(map(abs, errors))
    ninth = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    return f"error {statistics.median(sizes):.1%} in the median, {ninth:.1%} at the 90th percentile"


def summary(entries: Sequence[LedgerEntry]) -> str:
    taken = f"measured steps take {correction(entries):.3f} of the predicted time in the median"
    return f"{len(entries)} runs: {spread([entry.error for entry in entries])}; {taken}"


def as_json(entries: Sequence[LedgerEntry]) -> str:
    return json.dumps([vars(entry) | {"error": entry.error} for entry in entries], indent=2) + "\n"
