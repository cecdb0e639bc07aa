# SPDX-License-Identifier: Apache-2.0
"""Features that need Transformer Engine or an optional package."""

from megatron.bridge.backends.specs import layer_specs
from megatron.bridge.training.config.resolve.findings import Findings
from megatron.bridge.training.config.run_config import RunConfig

# Modules whose output Megatron-Core discards and recomputes, through Transformer Engine's state, and modules that
# it recomputes with torch's checkpointing.
RECOMPUTED_BY_ENGINE = ("layernorm", "mla_up_proj", "moe_act", "gdn_norm_out")
RECOMPUTED_BY_TORCH = ("core_attn", "mlp", "moe", "shared_experts")

# setting that only Transformer Engine's layers support -> what to do without it
NEEDS_ENGINE = {
    "tp_comm_overlap": "switch it off",
    "delay_wgrad_compute": "switch it off",
    "cpu_offloading": "recompute instead, with model.recompute_granularity=full",
    "fine_grained_activation_offloading": "recompute instead, with model.recompute_granularity=selective",
}


def check_requirements(config: RunConfig, findings: Findings) -> None:
    _check_recomputed_modules(config, findings)
    _check_engine_settings(config, findings)
    if config.optimizer.optimizer == "muon" and not findings.hardware.emerging_optimizers:
        findings.lacking(
            "optimizer.optimizer=muon needs the package emerging-optimizers, which is not installed",
            "install it (pip install 'hf-megatron-bridge[muon]'), or use adam",
        )


def _check_recomputed_modules(config: RunConfig, findings: Findings) -> None:
    """Megatron-Core 0.19 reads Transformer Engine's state whenever it discards an output.

    Without Transformer Engine that is a ``NameError`` in the first step.
    """
    model = config.model
    chosen = (model.recompute_modules or ()) if model.recompute_granularity == "selective" else ()
    names = [name for name in chosen if name in RECOMPUTED_BY_ENGINE]
    if names and not findings.hardware.transformer_engine:
        others = ", ".join(RECOMPUTED_BY_TORCH)
        findings.lacking(
            f"model.recompute_modules={', '.join(names)} needs Transformer Engine, which is not installed",
            f"choose {others} instead, or model.recompute_granularity=full",
        )


def _check_engine_settings(config: RunConfig, findings: Findings) -> None:
    """Other layers would ignore these settings, or fail in the first step."""
    model = config.model
    used = {name: remedy for name, remedy in NEEDS_ENGINE.items() if getattr(model, name)}
    if not used or layer_specs.resolve_backend(model.backend) == "transformer_engine":
        return
    why = "but model.backend is torch" if findings.hardware.transformer_engine else "which is not installed"
    for name, remedy in used.items():
        findings.lacking(f"model.{name}=True needs Transformer Engine, {why}", remedy)
