# SPDX-License-Identifier: Apache-2.0
"""The adapters of a run's checkpoint outside of the run."""

from pathlib import Path
from typing import Any

from megatron.bridge.checkpoint import distributed, layout, model_io, verification
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.peft.base import PEFT
from megatron.bridge.peft.checkpoint import fingerprint, set_trained_state, trained_state
from megatron.bridge.utils.config.serialize import from_plain
from megatron.bridge.utils.errors import UserError


def base_name(path: Path) -> str:
    """Where the base of the adapters was when they were trained."""
    return str(_base(path)[1]["name"])


def adapted_model(path: Path, base: str, trust_remote_code: bool, check: bool) -> tuple[AutoBridge, list[Any]]:
    """The base with the adapters of a checkpoint, in one process.

    Args:
        path: A run's folder or one of its checkpoints.
        base: Hugging Face directory or hub id.
        trust_remote_code: Run the base's own code.
        check: Refuse a base that the adapters were not trained on.

    Raises:
        UserError: no checkpoint of adapters, or another base.
    """
    directory, saved = _base(path)
    method = from_plain(model_io.read_run_config(directory)["peft"])
    assert isinstance(method, PEFT), "a run with a base has a method"
    bridge = AutoBridge.from_hf_pretrained(base, trust_remote_code=trust_remote_code)
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    if check and fingerprint(model) != saved["fingerprint"]:
        raise UserError(
            f"checkpoint {directory} holds adapters of {saved['name']}, whose weights are not those of {base}: "
            "give the base that they were trained on"
        )
    method(model, training=False)
    verification.verify(directory)
    state = trained_state(model, model_io.stored_metadata(distributed.load_common(directory)))
    set_trained_state(model, distributed.load(state, directory, known=model_io.BESIDE_WEIGHTS))
    return bridge, model


def _base(path: Path) -> tuple[Path, dict[str, str]]:
    """The iteration's directory, and what it says of the adapters' base."""
    directory = on_first_rank(lambda: layout.resolve(path))
    saved = distributed.load_common(directory).get("run", {}).get("base")
    if saved is None:
        raise UserError(f"checkpoint {directory} holds no adapters: `megatron-bridge export` writes its weights")
    return directory, saved
