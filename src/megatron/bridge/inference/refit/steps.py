# SPDX-License-Identifier: Apache-2.0
"""What a sender says to a receiver, in this order: ``Begin``, a ``Bucket`` for each, ``Finish``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Begin:
    """New weights are coming."""

    infos: list[Any]  # ``WeightInfo`` of each tensor, in order
    bucket_bytes: int  # as ``packing.layout`` takes it, so that both sides know what a bucket holds
    path: Path  # of the shared buffer
    size: int  # of the shared buffer
    partial: bool  # only tensors that changed are coming
    running: Any = "abort"  # what becomes of texts that run, as ``Engine.new_weights`` takes it


@dataclass(frozen=True)
class Bucket:
    """The buffer holds the tensors of bucket ``index``; their place may be filled again after the answer."""

    index: int


@dataclass(frozen=True)
class Finish:
    """Everything has come."""


WeightStep = Begin | Bucket | Finish
