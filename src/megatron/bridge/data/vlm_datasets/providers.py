# SPDX-License-Identifier: Apache-2.0
"""Conversations with images or videos.

They are well-known datasets on the Hugging Face hub, by name; pictures that are generated, for tests and benchmarks;
and files of the user's choice.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import numpy as np

from megatron.bridge.data.dataset_config import SPLITS, Split, too_small
from megatron.bridge.data.finetuning.sft_config import SFTDatasetConfig
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.records.sources import FileSource, HubSource, LocatedRecord
from megatron.bridge.utils.config.ranges import SEED
from megatron.bridge.utils.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from PIL import Image


_PREFIX, _SUFFIX = "make_", "_dataset"
_ROLES = {"human": "user", "gpt": "assistant"}
Row = Mapping[str, Any]
Record = dict[str, Any]


class Maker(NamedTuple):
    """A dataset on the hub and how its rows are read."""

    dataset: str
    subset: str | None
    record: Callable[[Row], Record]


def conversation(images: list[Any], question: str, answer: str) -> Record:
    parts = [{"type": "image", "image": image} for image in images]
    content = [*parts, {"type": "text", "text": question}]
    return {
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    }


def rdr(row: Row) -> Record:
    """Pictures of things with a description."""
    return conversation([row["image"]], "Describe this image.", row["text"])


def medpix(row: Row) -> Record:
    """Medical images with a question and an answer."""
    return conversation([row["image_id"]], row["question"], row["answer"])


def cord_v2(row: Row) -> Record:
    """Receipts; the answer is what they say, as tagged text."""
    truth = json.loads(row["ground_truth"])
    parsed = truth.get("gt_parse") or truth["gt_parses"][0]
    return conversation([row["image"]], "Describe this image.", tagged(parsed))


def raven(row: Row) -> Record:
    """Puzzles of several pictures in a row."""
    first = row["texts"][0]
    return conversation(list(row["images"]), first["user"], first["assistant"])


def llava_video_178k(row: Row) -> Record:
    """Conversations about a video, whose file is below ``dataset.media_root``; its mark is in any turn, or none."""
    turns = [
        {
            "role": _ROLES[turn["from"]],
            "content": re.sub(r"\s*<(image|video)>\s*", "", turn["value"]),
        }
        for turn in row["conversations"]
    ]
    parts = [
        {"type": "video", "video": row["video"]},
        {"type": "text", "text": turns[0]["content"]},
    ]
    return {"messages": [{"role": "user", "content": parts}, *turns[1:]]}


def tagged(value: Any) -> str:
    """Nested values as text: keys become tags, entries of a list are separated by ``<sep/>``.

    Example:
        >>> tagged({"menu": [{"nm": "tea"}, {"nm": "pie"}]})
        '<s_menu><s_nm>tea</s_nm><sep/><s_nm>pie</s_nm></s_menu>'
    """
    if isinstance(value, Mapping):
        return "".join(
            f"<s_{key}>{tagged(value[key])}</s_{key}>" for key in sorted(value, reverse=True)
        )
    return "<sep/>".join(map(tagged, value)) if isinstance(value, list) else str(value)


MAKERS: Mapping[str, Maker] = {
    "rdr": Maker("quintend/rdr-items", None, rdr),
    "cord_v2": Maker("naver-clova-ix/cord-v2", None, cord_v2),
    "medpix": Maker("mmoukouba/MedPix-VQA", None, medpix),
    "raven": Maker("HuggingFaceM4/the_cauldron", "raven", raven),
    "llava_video_178k": Maker(
        "lmms-lab/LLaVA-Video-178K", "0_30_s_nextqa", llava_video_178k
    ),  # split open_ended
}
"""Short name -> its maker."""


@dataclass(kw_only=True)
class HFDatasetConversationProvider(SFTDatasetConfig):
    """A dataset whose rows a maker turns into conversations."""

    maker_name: str  # a key of ``MAKERS``, such as ``rdr``; also written ``make_rdr_dataset``
    dataset_name: str | None = (
        None  # hub id, or a folder with rows of the same columns; None is the maker's own
    )
    revision: str | None = None  # branch, tag or commit on the hub
    train_split: str = "train"  # name of the training split
    validation_split: str | None = (
        "validation"  # name of the validation split; None needs ``do_validation=False``
    )
    test_split: str | None = None  # name of the test split; None skips testing

    @property
    def maker(self) -> Maker:
        name = self.maker_name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        if name not in MAKERS:
            raise UserError(
                f"dataset.maker_name={self.maker_name} is unknown: use one of {', '.join(MAKERS)}"
                f"{did_you_mean(name, MAKERS)}"
            )
        return MAKERS[name]

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.process_example_fn is not None:
            problems.append(
                f"dataset.process_example_fn has no effect with dataset.maker_name={self.maker_name}, which makes "
                "the records: use HFDatasetConfig, or leave it unset"
            )
        return problems

    def check_sources(self) -> None:
        self.maker  # noqa: B018 - raises for an unknown name

    def encoding_rules(self) -> EncodingRules:
        return replace(super().encoding_rules(), process_example_fn=self.maker.record)

    def source(self, split: Split) -> HubSource | None:
        """The rows of the split; validation is refused without one."""
        names = {"train": self.train_split, "valid": self.validation_split, "test": self.test_split}
        name = names[split]
        maker = self.maker
        if name is None and split == "valid":
            raise UserError(
                "dataset.validation_split is not set: name a split, or set dataset.do_validation=false and "
                "validation.eval_iters=0"
            )
        if name is None:
            return None
        is_default = self.dataset_name is None
        return HubSource(
            self.dataset_name or maker.dataset,
            maker.subset if is_default else None,
            name,
            self.revision,
        )


COLORS = ("red", "green", "blue")


@dataclass(kw_only=True)
class MockVLMConversationProvider(SFTDatasetConfig):
    """Pictures of noise in which one color is stronger; the answers name it, so a model can learn them."""

    prompt: str = "Describe this image."  # the question about the images
    random_seed: Annotated[int, SEED] = 0  # seed of the pictures
    image_size: tuple[int, int] = (256, 256)  # width and height in pixels
    num_images: int = 1  # images of a sample
    num_samples: int = 64  # different samples of a split

    def problems(self) -> list[str]:
        problems = [*super().problems(), *too_small(self, "num_samples")]
        if self.num_images < 0:
            problems.append(f"dataset.num_images={self.num_images}: it cannot be negative")
        if min(self.image_size) < 1:
            problems.append(f"dataset.image_size={self.image_size}: both sides must be at least 1")
        return problems

    def source(self, split: Split) -> "MockImageSource":
        seed = (self.random_seed, SPLITS.index(split))
        return MockImageSource(
            self.prompt, seed, self.image_size, self.num_images, self.num_samples
        )


@dataclass(frozen=True)
class MockImageSource:
    prompt: str
    seed: tuple[int, int]
    image_size: tuple[int, int]
    num_images: int
    num_samples: int

    name: ClassVar[str] = "generated pictures"

    def records(self) -> Iterator[LocatedRecord]:
        for index in range(self.num_samples):
            yield (
                f"{self.name}: {index + 1}",
                self._record(np.random.default_rng((*self.seed, index))),
            )

    def fingerprint(self) -> str:
        return repr(self)

    def _record(self, rng: np.random.Generator) -> dict[str, Any]:
        chosen = rng.integers(len(COLORS), size=self.num_images).tolist()
        images = [{"type": "image", "image": self._picture(rng, color)} for color in chosen]
        question = [*images, {"type": "text", "text": self.prompt}]
        answer = ", ".join(COLORS[color] for color in chosen) or "There is no image."
        return {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }

    def _picture(self, rng: np.random.Generator, color: int) -> "Image.Image":
        from PIL import Image

        width, height = self.image_size
        pixels = rng.integers(0, 128, (height, width, 3), dtype=np.uint8)
        pixels[..., color] += 127
        return Image.fromarray(pixels)


@dataclass(kw_only=True)
class PreloadedVLMConversationProvider(SFTDatasetConfig):
    """Records in LLaVA's JSON or in the formats of ``FinetuningDatasetConfig``, and images below ``image_folder``."""

    train_data_path: str  # file with the training records
    valid_data_path: str | None = (
        None  # file with the validation records; None needs ``do_validation=False``
    )
    test_data_path: str | None = None  # file with the test records; None skips testing
    image_folder: str | None = (
        None  # where the paths of images start; None is the folder of ``train_data_path``
    )

    @property
    def media_folder(self) -> str:
        return self.media_root or self.image_folder or str(Path(self.train_data_path).parent)

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.media_root and self.image_folder and self.media_root != self.image_folder:
            problems.append(
                f"dataset.image_folder={self.image_folder} and dataset.media_root={self.media_root} mean the "
                "same: set one of them"
            )
        return problems

    def check_sources(self) -> None:
        for name in ("train_data_path", "valid_data_path", "test_data_path"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise UserError(f"dataset.{name}={path} is not a file: check the path")
        if self.image_folder is not None and not Path(self.image_folder).is_dir():
            raise UserError(
                f"dataset.image_folder={self.image_folder} is not a directory: check the path"
            )

    def source(self, split: Split) -> FileSource | None:
        path = {
            "train": self.train_data_path,
            "valid": self.valid_data_path,
            "test": self.test_data_path,
        }[split]
        if path is None and split == "valid":
            raise UserError(
                "dataset.valid_data_path is not set: give a file, or set dataset.do_validation=false and "
                "validation.eval_iters=0"
            )
        return None if path is None else FileSource(Path(path))
