# SPDX-License-Identifier: Apache-2.0
"""From the config that a user wrote to the config that runs.

Each step fills in only what is None, or what it alone owns, and notes every value that it replaces. A value that
contradicts another one is a problem and is never replaced. Resolving a resolved config changes nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.bridge.training.config.resolve import parallelism
from megatron.bridge.training.config.resolve.data import derive_data, derive_mtp_layers
from megatron.bridge.training.config.resolve.findings import Findings, Hardware
from megatron.bridge.training.config.resolve.precision import (
    check_quantization,
    derive_backend,
    derive_precision,
)
from megatron.bridge.training.config.resolve.requirements import check_requirements
from megatron.bridge.training.config.resolve.schedule import (
    derive_evaluation_alone,
    derive_folders,
    derive_length,
    derive_schedule,
)
from megatron.bridge.training.config.resolve.usual_ranges import unusual_numbers
from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils import storage
from megatron.bridge.utils.config.keys import leaf_values
from megatron.bridge.utils.config.origins import Origins
from megatron.bridge.utils.config.serialize import copy_config
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.storage_paths import url_of


@dataclass(frozen=True)
class Resolved[ConfigT: RunConfig]:
    config: ConfigT  # a copy of the user's config in which every derived field is set
    world_size: int
    notes: list[str]  # a sentence for each value that was replaced, to be shown to the user
    problems: list[str]  # a sentence for each contradiction; a config with one must not run
    origins: Origins  # where each value of ``config`` came from
    tokenizer: Any = (
        None  # added by ``setup.add_tokenizer``; None where nothing needs one, as in a dry run
    )

    def set_derived(self, key: str, value: Any) -> None:
        """Set a field ``block.name`` that could not be derived before."""
        before = leaf_values(self.config)
        block, _, name = key.partition(".")
        setattr(getattr(self.config, block), name, value)
        self.origins.record_derived(self.config, before)


def resolve[ConfigT: RunConfig](
    config: ConfigT,
    world_size: int,
    hardware: Hardware,
    origins: Origins | None = None,
    count_rows: Callable[[Any], int] | None = None,
) -> Resolved[ConfigT]:
    """Derive everything that ``config`` leaves open; ``config`` itself stays as it is.

    Args:
        config: What the user wrote; its parallel sizes fit ``world_size``.
        hardware: The machine that the config is resolved for.
        origins: Where the values of ``config`` came from; None means a script.
        count_rows: Counts the rows of an epoch, if ``train.num_epochs`` is set; None leaves ``train_iters``.
    """
    copied = copy_config(config)
    findings = Findings(hardware, count_rows)
    findings.problems += list(use_local_folders(copied))
    before = leaf_values(copied)
    _derive(copied, world_size, findings)
    origins = origins.copy() if origins else Origins.of(config, "script")
    origins.record_derived(copied, before)
    return Resolved(copied, world_size, findings.notes, findings.problems, origins)


def _derive(config: RunConfig, world_size: int, findings: Findings) -> None:
    """Run all steps; later ones read what earlier ones set."""
    derive_evaluation_alone(config)
    derive_mtp_layers(config, findings)
    derive_precision(config, findings)
    derive_backend(config, findings)
    check_quantization(config, findings)
    parallelism.derive_sharding(config, world_size, findings)
    parallelism.derive_overlap(config, world_size, findings)
    parallelism.copy_param_gather(config, findings)
    check_requirements(config, findings)
    parallelism.overlap_interleaved_messages(config, findings)
    derive_data(config, world_size, findings)
    derive_length(config, findings)
    derive_schedule(config, findings)
    derive_folders(config)
    findings.notes += unusual_numbers(config)


_FOLDERS = ("save", "load", "pretrained_checkpoint")
# read where they are used
_READ = (
    *("tokenizer.tokenizer_model", "dataset.dataset_root", "dataset.dataset_name", "dataset.blend"),
    *("dataset.blend_per_split", "dpo.reference", "grpo.reference"),
    "grpo.critic.model",
)


def use_local_folders(config: RunConfig) -> Iterator[str]:
    """Replace the URLs in ``config``; yields a sentence for each one that cannot be used."""
    for name in _FOLDERS:
        value = getattr(config.checkpoint, name)
        try:
            setattr(
                config.checkpoint,
                name,
                str(storage.local(value)) if "://" in (value or "") else value,
            )
        except UserError as error:
            yield f"checkpoint.{name}={value}: {error}"
    takes = (*(f"checkpoint.{name}" for name in _FOLDERS), *_READ)
    for key, value in leaf_values(config).items():
        if key not in takes and storage.is_url(value):
            yield f"{key}={value} cannot be a URL: give a local path; URLs can be given for {', '.join(takes)}"
    saved = config.checkpoint
    on_a_disk = {
        "checkpoint.async_strategy=nvrx": saved.async_save and saved.async_strategy == "nvrx",
        "checkpoint.also_save_hf_checkpoint=True": saved.also_save_hf_checkpoint,
        "checkpoint.non_persistent_ckpt_type=global": saved.non_persistent_ckpt_type == "global",
        "ft": config.ft is not None,
    }
    for key in (
        key for key, is_set in on_a_disk.items() if is_set and url_of(saved.save or "") is not None
    ):
        yield f"{key} needs a run folder on a disk, and checkpoint.save={saved.save} is a URL: change one of them"
