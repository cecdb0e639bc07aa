# SPDX-License-Identifier: Apache-2.0
"""Settings of the model that follow the weights it starts from."""

from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.gpt_provider import drop_mtp_layers
from megatron.bridge.models.hf_pretrained.hub import on_this_machine
from megatron.bridge.training.config.resolve.findings import Findings
from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils.errors import UserError


def derive_mtp_layers(config: RunConfig, findings: Findings) -> None:
    """Drop the layers of multi-token prediction where the weights have none, whatever their config declares.

    transformers drops them when it saves a model. A recipe's number gives way; one that the user typed is refused
    later.
    """
    start = config.checkpoint.pretrained_checkpoint
    folder = on_this_machine(start) if config.model.mtp_num_layers and start else None
    if folder is None:
        return
    try:
        missing = AutoBridge.from_hf_pretrained(folder).lacks_mtp_layers()
    except UserError as error:
        findings.problems.append(f"checkpoint.pretrained_checkpoint={start}: {error}")
        return
    if missing:
        drop_mtp_layers(config.model)
        findings.notes.append(
            f"model.mtp_num_layers=None is used: checkpoint.pretrained_checkpoint={start} has no tensors of "
            "multi-token prediction"
        )
