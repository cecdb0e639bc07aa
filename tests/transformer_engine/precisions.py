# SPDX-License-Identifier: Apache-2.0
"""What Transformer Engine is told to quantize, and how, under each precision with FP8 or FP4.

usage: python -m tests.transformer_engine.precisions OUTPUT

Needs ``scripts/extra.sh te``. Runs a forward pass of four layers of Transformer Engine, without its kernels, and
writes a JSON object to OUTPUT: precision -> for each context that a layer or the whole decoder enters, the recipe.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.transformer_engine import extension
from tests.transformer_engine.proof import prepare

FIELDS = ("fp8_format", "fp4_format", "amax_history_len", "amax_compute_algo", "margin", "fp8_dpa")


def main(output: str) -> None:
    extension.install()
    from megatron.bridge.training.config.blocks.mixed_precision import RECIPES

    prepare()
    names = [name for name in RECIPES if "fp8" in name or "fp4" in name]
    Path(output).write_text(json.dumps({name: recipes(name) for name in names}, indent=1))


def recipes(precision: str) -> list[str]:
    """The recipes of a forward pass, in order."""
    import transformer_engine.pytorch as te
    from megatron.core import parallel_state

    from megatron.bridge.backends.cpu.without_memory import one_rank
    from megatron.bridge.training import setup
    from tests.toy_run import SEQUENCE, toy_config

    entered: list[str] = []

    def autocast(
        enabled: bool, fp8_recipe: Any, fp8_group: Any
    ) -> contextlib.AbstractContextManager[None]:
        assert enabled
        assert fp8_group is not None
        entered.append(described(fp8_recipe))
        return contextlib.nullcontext()

    te.fp8_autocast = autocast
    config = (
        toy_config(model={"backend": "transformer_engine"}, mixed_precision=precision)
        .resolve(world_size=1)
        .config
    )
    with one_rank(0, 1):
        try:
            setup.initialize(config)
            (chunk,) = config.model.provide_distributed_model(wrap_with_ddp=False)
            ids = torch.zeros(2, SEQUENCE, dtype=torch.long)
            chunk(input_ids=ids, position_ids=ids, attention_mask=None)
        finally:
            parallel_state.destroy_model_parallel()
    return entered


def described(recipe: Any) -> str:
    values = {name: getattr(recipe, name) for name in FIELDS if hasattr(recipe, name)}
    return (
        f"{type(recipe).__name__}({', '.join(f'{name}={value}' for name, value in values.items())})"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
