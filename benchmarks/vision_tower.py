# SPDX-License-Identifier: Apache-2.0
"""Time of a vision tower: shared or replicated over tensor-parallel ranks, all images in one call or one by one.

``torchrun --nproc-per-node 2 benchmarks/vision_tower.py`` encodes 16 images of 64 to 256 tokens, forward and
backward, with the tower of Qwen2.5-VL cut to ``--depth`` layers. ``python benchmarks/vision_tower.py`` compares one
call for all images with a call for each. Each prints the median of interleaved rounds, in seconds.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from measure import interleaved, median, table

import megatron.bridge.recipes
from megatron.bridge.models.vision import sharing
from megatron.bridge.models.vision.media import costs, select
from megatron.bridge.models.vision.tower import build_tower, dummy_media, encode

CONFIG = Path(megatron.bridge.recipes.__path__[0]) / "configs" / "Qwen--Qwen2.5-VL-3B-Instruct.json"


def make_tower(depth: int) -> Any:
    config = json.loads(CONFIG.read_text())
    config["vision_config"]["depth"] = depth
    torch.manual_seed(0)
    return build_tower(config, torch.float32)


def make_images(tower: Any, count: int) -> dict[str, torch.Tensor]:
    """Images of several sizes and shapes."""
    random = torch.Generator().manual_seed(1)
    sides = torch.randint(8, 17, (count, 2), generator=random)
    merge = tower.visual.spatial_merge_size
    grid = torch.cat((torch.ones(count, 1, dtype=torch.long), sides * merge), dim=1)
    width = dummy_media(tower)["pixel_values"].shape[1]
    return {
        "pixel_values": torch.rand(int(grid.prod(-1).sum()), width, generator=random),
        "image_grid_thw": grid,
    }


def step(tower: Any, media: dict[str, torch.Tensor], share: bool) -> None:
    found, _ = sharing.features(tower, media, share, dummy_media(tower))
    assert found is not None
    found.square().mean().backward()
    tower.zero_grad()


def one_by_one(tower: Any, media: dict[str, torch.Tensor]) -> None:
    rows = [encode(tower, select(media, [index])).rows for index in range(len(costs(media)))]
    torch.cat(rows).square().mean().backward()
    tower.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    from megatron.core import parallel_state

    from megatron.bridge.utils import distributed

    torch.distributed.init_process_group(
        "gloo"
    ) if torch.distributed.is_torchelastic_launched() else None
    ranks = distributed.world_size()
    torch.set_num_threads(max(2 // ranks, 1))
    tower = make_tower(args.depth)
    media = make_images(tower, args.images)
    if ranks > 1:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
        cases = {
            "shared": lambda: step(tower, media, True),
            "replicated": lambda: step(tower, media, False),
        }
    else:
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
        cases = {
            "one call": lambda: step(tower, media, True),
            "a call for each": lambda: one_by_one(tower, media),
        }
    timings = {name: median(found) for name, found in interleaved(cases, args.rounds).items()}
    tokens = sum(costs(media)) // tower.visual.spatial_merge_size**2
    rows = [[name, f"{timing.wall:.3f}", f"{timing.cpu:.3f}"] for name, timing in timings.items()]
    if distributed.rank() == 0:
        print(table([f"{args.images} images, {tokens} tokens", "s", "CPU s"], rows))


if __name__ == "__main__":
    main()
