# SPDX-License-Identifier: Apache-2.0
"""The config of prompts whose completions the model writes itself."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.bridge.data.dataset_config import DatasetRequest, Split, Splits
from megatron.bridge.data.finetuning.sft_config import (
    FinetuningDatasetConfig,
    HFDatasetConfig,
    SFTDatasetConfig,
    is_read_by_datasets,
)
from megatron.bridge.data.records.sources import RecordSource
from megatron.bridge.utils import storage

if TYPE_CHECKING:
    from megatron.bridge.data.prompts.prompts import PromptEncoder
    from megatron.bridge.data.tokenizer import Tokenizer


@dataclass(kw_only=True)
class PromptDatasetConfig(SFTDatasetConfig):
    """Prompts for reinforcement learning.

    A record has ``prompt``, a text or a list of messages. Its other keys, such as a reference
    answer, are given to the reward functions. ``seq_length`` limits a prompt and its completion
    together.
    """

    dataset_root: str
    """Folder with ``training.jsonl`` (or ``.parquet``, ``.arrow``), a single file, a folder that
    `datasets` saved, or a dataset on the hub."""
    dataset_subset: str | None = None
    """Configuration of a dataset on the hub, if it has several."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    train_split: str = "train"
    """Name of the split, in a dataset of `datasets`."""
    validation_split: str | None = None
    """Name of the split with held-out prompts, in a dataset of `datasets`; a folder has them in
    ``validation.jsonl``."""
    do_validation: bool = True
    """Read held-out prompts, if there are any; ``validation.eval_iters`` says how many are completed."""
    do_test: bool = False
    padding_free: bool = True
    max_prompt_length: int | None = None
    """Maximum number of tokens of a prompt; ``truncation`` says what happens to longer ones. None is
    what ``grpo.max_completion_length`` leaves of ``seq_length``."""
    completions_per_epoch: int | None = None
    """Samples that each prompt is in an epoch, for ``train.num_epochs``. None is
    ``grpo.num_generations * grpo.num_iterations``."""

    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the tools that each prompt offers. Training sets them to those of ``grpo.tools``."""

    @property
    def longest_prompt(self) -> int:
        """The maximum number of tokens of a prompt."""
        return self.max_prompt_length or self.seq_length - 1

    def check_sources(self) -> None:
        self._config_of_source().check_sources()

    def source(self, split: Split) -> RecordSource | None:
        """The prompts of a split; there is no test split."""
        if split == "test" or (split == "valid" and not self._may_have_validation):
            return None
        return self._config_of_source().source(split)

    @property
    def _may_have_validation(self) -> bool:
        is_folder = not is_read_by_datasets(self.dataset_root)
        return self.do_validation and (is_folder or self.validation_split is not None)

    def _config_of_source(self) -> SFTDatasetConfig:
        common = {
            "seq_length": self.seq_length,
            "do_validation": self._may_have_validation,
            "do_test": False,
        }
        if not is_read_by_datasets(self.dataset_root):
            return FinetuningDatasetConfig(dataset_root=self.dataset_root, **common)
        return HFDatasetConfig(
            dataset_name=self.dataset_root,
            dataset_subset=self.dataset_subset,
            revision=self.revision,
            train_split=self.train_split,
            validation_split=self.validation_split,
            **common,
        )

    @property
    def media_folder(self) -> str:
        return self.media_root or str(storage.local(self.dataset_root))

    def encoder(self, tokenizer: "Tokenizer") -> "PromptEncoder":
        from megatron.bridge.data.prompts.prompts import PromptEncoder  # imports torch

        return PromptEncoder(tokenizer, self.encoding_rules(), self.longest_prompt, self.tools)

    def problems(self) -> list[str]:
        problems = super().problems()
        if not self.padding_free or self.packed:
            problems.append(
                "dataset.padding_free=False: rows of completions have no padding, leave it True, and "
                "do not pack"
            )
        if self.truncation not in ("refuse", "drop"):
            problems.append(
                f"dataset.truncation={self.truncation}: a shortened prompt asks something else, use "
                "refuse or drop"
            )
        if self.do_test:
            problems.append(
                "dataset.do_test=True: held-out prompts are those of the validation split, leave it False"
            )
        if self.prepared_dir is not None:
            problems.append(
                f"dataset.prepared_dir={self.prepared_dir}: prompts are tokenized at each start, "
                "remove it"
            )
        return problems

    def build(self, request: DatasetRequest) -> Splits:
        from megatron.bridge.data.prompts.prompts import build_prompt_splits  # imports torch

        self.finalize()
        return build_prompt_splits(self, request)

    def count_rows(self, tokenizer: "Tokenizer") -> int:
        from megatron.bridge.data.prompts.prompts import build_prompts  # imports torch

        self.finalize()
        rows = build_prompts(self, tokenizer, size=1).rows
        return len(rows) * (self.completions_per_epoch or 1)
