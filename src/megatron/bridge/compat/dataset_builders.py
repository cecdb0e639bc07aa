# SPDX-License-Identifier: Apache-2.0
"""Builders of fine-tuning datasets, for programs that build datasets without a config."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.bridge.data.dataset_config import SPLITS, DatasetRequest
from megatron.bridge.data.finetuning.rows import EpochRows
from megatron.bridge.data.finetuning.sft_config import (
    FinetuningDatasetConfig,
    HFDatasetConfig,
    SFTDatasetConfig,
)
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer, Tokenizer, TokenizerConfig
from megatron.bridge.data.tokenizer import build_tokenizer as build_tokenizer_of
from megatron.bridge.utils.errors import UserError


class FinetuningDatasetBuilder:
    """Builds the datasets of a folder with ``training.jsonl``, ``validation.jsonl`` and ``test.jsonl``.

    Args:
        dataset_root: The folder.
        tokenizer: A tokenizer of this package or of transformers, or a folder or hub id.
        seq_length: Tokens of a row.
        seed: Of the order of training samples.
        memmap_workers: Processes that tokenize.
        max_train_samples: Largest number of records for training.
        packed_sequence_specs: How samples are packed into rows; None packs none.
        dataset_kwargs: More fields of ``FinetuningDatasetConfig``.
        do_validation: Whether to build the validation data.
        do_test: Whether to build the test data.
    """

    def __init__(
        self,
        dataset_root: str | Path,
        tokenizer: Any,
        seq_length: int = 2048,
        seed: int = 1234,
        memmap_workers: int = 1,
        max_train_samples: int | None = None,
        packed_sequence_specs: Any = None,
        dataset_kwargs: dict[str, Any] | None = None,
        do_validation: bool = True,
        do_test: bool = True,
    ) -> None:
        self.tokenizer = _as_tokenizer(tokenizer)
        self.config: SFTDatasetConfig = FinetuningDatasetConfig(
            dataset_root=str(dataset_root),
            seq_length=seq_length,
            seed=seed,
            workers=memmap_workers,
            max_train_samples=max_train_samples,
            packed_sequence_specs=packed_sequence_specs,
            do_validation=do_validation,
            do_test=do_test,
            **(dataset_kwargs or {}),
        )

    def build(self) -> list[Any]:
        """Return the datasets for training, validation and testing; None where there is no data.

        All ranks must call this. Each has the rows of one epoch.
        """
        self.config.check_sources()
        # of one row each: how many there are is known when they are packed
        splits = self.config.build(DatasetRequest((1, 1, 1), self.tokenizer))
        datasets: list[Any] = []
        for split, dataset in zip(SPLITS, splits, strict=True):
            if isinstance(dataset, EpochRows) and self.config.uses_split(split):
                datasets.append(replace(dataset, size=len(dataset.rows)))
            else:
                datasets.append(None)
        return datasets


class HFDatasetBuilder(FinetuningDatasetBuilder):
    """Builds the datasets of records that ``datasets`` loads.

    Args:
        dataset_name: Hub id, or a folder that ``datasets`` saved.
        tokenizer: As for ``FinetuningDatasetBuilder``.
        process_example_fn: From a record to ``prompt`` and ``completion``, or ``messages``.
        dataset_subset: Configuration of the dataset, if it has several.
        split: Name of the training split.
        seq_length: Tokens of a row.
        seed: Of the order of training samples, and of those that are held out.
        memmap_workers: Processes that tokenize.
        max_train_samples: Largest number of records for training.
        packed_sequence_specs: How samples are packed into rows; None packs none.
        val_proportion: Share of the training split that is held out for validation; None holds out none.
        dataset_kwargs: More fields of ``HFDatasetConfig``.
        do_validation: Whether to build the validation data.
        do_test: Whether to build the test data, of ``dataset_kwargs["test_split"]``.
        **others: Settings of downloads and copies, of which only those that change nothing are accepted.
    """

    def __init__(
        self,
        dataset_name: str,
        tokenizer: Any,
        process_example_fn: Any = None,
        dataset_subset: str | None = None,
        split: str | None = None,
        seq_length: int = 1024,
        seed: int = 1234,
        memmap_workers: int = 1,
        max_train_samples: int | None = None,
        packed_sequence_specs: Any = None,
        val_proportion: float | None = 0.05,
        dataset_kwargs: dict[str, Any] | None = None,
        do_validation: bool = True,
        do_test: bool = False,
        **others: Any,
    ) -> None:
        _refuse_others(others)
        self.tokenizer = _as_tokenizer(tokenizer)
        held_out = {} if val_proportion is None else {"val_proportion": val_proportion}
        self.config = HFDatasetConfig(
            dataset_name=dataset_name,
            process_example_fn=process_example_fn,
            dataset_subset=dataset_subset,
            train_split=split or "train",
            seq_length=seq_length,
            seed=seed,
            workers=memmap_workers,
            max_train_samples=max_train_samples,
            packed_sequence_specs=packed_sequence_specs,
            do_validation=do_validation and val_proportion is not None,
            do_test=do_test,
            **held_out,
            **(dataset_kwargs or {}),
        )


# keyword -> values that ask for what this package does anyway
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "dataset_dict": (None,),
    "dataset_root": (None,),
    "delete_raw": (False,),
    "download_mode": (None, "reuse_dataset_if_exists"),
    "hf_filter_lambda": (None,),
    "hf_filter_lambda_kwargs": (None, {}),
    "hf_kwargs": (None, {}),
    "rewrite": (True, False),
    "split_val_from_train": (True,),
}


def _refuse_others(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name not in _WITHOUT_EFFECT:
            raise TypeError(f"HFDatasetBuilder got an unexpected keyword argument {name!r}")
        if value not in _WITHOUT_EFFECT[name]:
            raise UserError(
                f"{name}={value!r} is not supported: records are read where they are; prepare them with "
                "`datasets`, save them with save_to_disk, and give the folder as dataset_name"
            )


def _as_tokenizer(tokenizer: Any) -> Tokenizer:
    """Return a tokenizer of this package for one of transformers, or for a folder or hub id."""
    if isinstance(tokenizer, (str, Path)):
        path = str(tokenizer)
    elif hasattr(tokenizer, "name_or_path"):
        path = tokenizer.name_or_path
    else:
        return tokenizer
    return build_tokenizer_of(
        TokenizerConfig(tokenizer_type=HuggingFaceTokenizer.__name__, tokenizer_model=path)  # pyright: ignore[reportArgumentType]
    )
