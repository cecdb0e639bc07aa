# SPDX-License-Identifier: Apache-2.0
"""Settings that are URLs of object storage: the run works on the local folders that stand for them."""

from collections.abc import Iterator

from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils import storage
from megatron.bridge.utils.config.origins import leaf_values
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.storage_paths import url_of

_FOLDERS = ("save", "load", "pretrained_checkpoint")
# read where they are used
_READ = (
    *("tokenizer.tokenizer_model", "dataset.dataset_root", "dataset.dataset_name", "dataset.blend"),
    *("dataset.blend_per_split", "dpo.reference"),
)


def use_local_folders(config: RunConfig) -> Iterator[str]:
    """Replace the URLs in ``config``; yields a sentence for each one that cannot be used."""
    for name in _FOLDERS:
        value = getattr(config.checkpoint, name)
        try:
            setattr(config.checkpoint, name, str(storage.local(value)) if "://" in (value or "") else value)
        except UserError as error:
            yield f"checkpoint.{name}={value}: {error}"
    takes = (*(f"checkpoint.{name}" for name in _FOLDERS), *_READ)
    for key, value in leaf_values(config).items():
        if key not in takes and storage.is_url(value):
            yield f"{key}={value} cannot be a URL: give a local path; URLs can be given for {', '.join(takes)}"
    saved = config.checkpoint
    on_a_disk = {
        "checkpoint.async_strategy=nvrx": saved.async_save and saved.async_strategy == "nvrx",
        "checkpoint.also_hf=True": saved.also_hf,
        "checkpoint.non_persistent_ckpt_type=global": saved.non_persistent_ckpt_type == "global",
        "ft": config.ft is not None,
    }
    for key in (key for key, is_set in on_a_disk.items() if is_set and url_of(saved.save or "") is not None):
        yield f"{key} needs a run folder on a disk, and checkpoint.save={saved.save} is a URL: change one of them"
