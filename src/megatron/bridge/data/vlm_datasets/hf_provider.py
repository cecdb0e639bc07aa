# SPDX-License-Identifier: Apache-2.0
"""Well-known datasets with images on the Hugging Face hub, by name."""

from dataclasses import dataclass

from megatron.bridge.data.dataset_config import Split
from megatron.bridge.data.finetuning.sft_config import SFTDatasetConfig
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.records.sources import HubSource
from megatron.bridge.data.vlm_datasets.hf_dataset_makers import MAKERS, Maker
from megatron.bridge.utils.errors import UserError, did_you_mean

_PREFIX, _SUFFIX = "make_", "_dataset"


@dataclass(kw_only=True)
class HFDatasetConversationProvider(SFTDatasetConfig):
    """A dataset whose rows a maker turns into conversations."""

    maker_name: str
    """``rdr``, ``cord_v2``, ``medpix`` or ``raven``; also written ``make_rdr_dataset``."""
    dataset_name: str | None = None
    """Hub id, or a folder with rows of the same columns; None is the maker's own."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    train_split: str = "train"
    """Name of the training split."""
    validation_split: str | None = "validation"
    """Name of the validation split; None needs ``do_validation=False``."""
    test_split: str | None = None
    """Name of the test split; None skips testing."""

    @property
    def maker(self) -> Maker:
        """What ``maker_name`` names.

        Raises:
            UserError: there is no such maker.
        """
        name = self.maker_name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        if name not in MAKERS:
            raise UserError(
                f"dataset.maker_name={self.maker_name} is unknown: use one of {', '.join(MAKERS)}"
                f"{did_you_mean(name, MAKERS)}"
            )
        return MAKERS[name]

    def problems(self) -> list[str]:
        found = super().problems()
        if self.process_example_fn is not None:
            found.append(
                f"dataset.process_example_fn has no effect with dataset.maker_name={self.maker_name}, which makes "
                "the records: use HFDatasetConfig, or leave it unset"
            )
        return found

    def check_sources(self) -> None:
        self.maker  # noqa: B018 - raises for an unknown name

    def encoding_rules(self) -> EncodingRules:
        rules = super().encoding_rules()
        return EncodingRules(**{**vars(rules), "process_example_fn": self.maker.record})

    def source(self, split: Split) -> HubSource | None:
        """The rows of the split.

        Raises:
            UserError: there is no split for validation.
        """
        names = {"train": self.train_split, "valid": self.validation_split, "test": self.test_split}
        name, maker = names[split], self.maker
        if name is None and split == "valid":
            raise UserError(
                "dataset.validation_split is not set: name a split, or set dataset.do_validation=false and "
                "validation.eval_iters=0"
            )
        if name is None:
            return None
        own = self.dataset_name is None
        return HubSource(self.dataset_name or maker.dataset, maker.subset if own else None, name, self.revision)
