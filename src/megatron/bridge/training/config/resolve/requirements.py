# SPDX-License-Identifier: Apache-2.0
"""Features that need Transformer Engine, an optional package, or a GPU."""

from megatron.core.transformer.moe import fused_a2a

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
    "fine_grained_activation_offloading": "use model.cpu_offloading=true instead, or recompute",
}

# backend of the flex dispatcher -> what it needs, and Megatron-Core's name for whether that is installed
FLEX_BACKENDS = {
    "deepep": ("the package deep_ep", "HAVE_DEEP_EP"),
    "hybridep": ("the package deep_ep with HybridEPBuffer", "HAVE_HYBRIDEP"),
    "ncclep": ("Transformer Engine with transformer_engine.pytorch.ep", "HAVE_TE_EP"),
}


def check_requirements(config: RunConfig, findings: Findings) -> None:
    _check_recomputed_modules(config, findings)
    _check_engine_settings(config, findings)
    _check_flex_dispatcher(config, findings)
    if config.ddp.nccl_ub and not findings.hardware.cuda:
        findings.lacking(
            "ddp.nccl_ub=True needs NCCL, and this machine has no GPU", "switch it off"
        )
    graphs = config.model.cuda_graph_impl
    if graphs != "none" and not findings.hardware.cuda:
        findings.lacking(
            f"model.cuda_graph_impl={graphs} needs a GPU, and this machine has none", "use none"
        )
    _check_optimizer(config, findings)


def _check_optimizer(config: RunConfig, findings: Findings) -> None:
    if config.optimizer.optimizer_cpu_offload and not findings.hardware.cuda:
        findings.lacking(
            "optimizer.optimizer_cpu_offload=True needs a GPU whose memory it saves, and this machine has none",
            "switch it off",
        )
    elif (
        config.optimizer.use_precision_aware_optimizer and not findings.hardware.transformer_engine
    ):
        findings.lacking(
            "optimizer.use_precision_aware_optimizer=True needs Transformer Engine, which is not installed",
            "switch it off",
        )
    name = config.optimizer.optimizer
    if name in ("muon", "lion") and not findings.hardware.emerging_optimizers:
        findings.lacking(
            f"optimizer.optimizer={name} needs the package emerging-optimizers, which is not installed",
            "install it (pip install 'hf-megatron-bridge[muon]'), or use adam",
        )


def _check_recomputed_modules(config: RunConfig, findings: Findings) -> None:
    """Refuse what ends in a ``NameError``: discarding outputs reads Transformer Engine's state (Megatron-Core 0.19)."""
    model = config.model
    chosen = (model.recompute_modules or ()) if model.recompute_granularity == "selective" else ()
    names = [name for name in chosen if name in RECOMPUTED_BY_ENGINE]
    if names and not findings.hardware.transformer_engine:
        alternatives = ", ".join(RECOMPUTED_BY_TORCH)
        findings.lacking(
            f"model.recompute_modules={', '.join(names)} needs Transformer Engine, which is not installed",
            f"choose {alternatives} instead, or model.recompute_granularity=full",
        )


def _check_engine_settings(config: RunConfig, findings: Findings) -> None:
    """Other layers would ignore these settings, or fail in the first step."""
    model = config.model
    used = {name: remedy for name, remedy in NEEDS_ENGINE.items() if getattr(model, name)}
    if not used or layer_specs.resolve_backend(model.backend) == "transformer_engine":
        return
    why = (
        "but model.backend is torch"
        if findings.hardware.transformer_engine
        else "which is not installed"
    )
    for name, remedy in used.items():
        findings.lacking(f"model.{name}=True needs Transformer Engine, {why}", remedy)


def _check_flex_dispatcher(config: RunConfig, findings: Findings) -> None:
    """Megatron-Core asserts that the package of the backend is there while it builds a layer."""
    model = config.model
    if not model.num_moe_experts or model.moe_token_dispatcher_type != "flex":
        return
    backend = str(model.moe_flex_dispatcher_backend)
    needed, flag = FLEX_BACKENDS[backend]
    if not getattr(fused_a2a, flag, False) or not findings.hardware.cuda:
        findings.lacking(
            f"model.moe_token_dispatcher_type=flex with moe_flex_dispatcher_backend={backend} needs a GPU and {needed}",
            "use alltoall, or a machine that has it",
        )
