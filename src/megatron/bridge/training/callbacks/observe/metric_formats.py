# SPDX-License-Identifier: Apache-2.0
"""How outputs show the metrics of a run. A metric without a row is a loss."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MetricFormat:
    """How the console and Prometheus show a metric.

    Attributes:
        console: A format of its value; None if the console does not show it.
        gauge: Its name in Prometheus, which ends in its base unit.
        meaning: What it is, for the page of Prometheus.
        factor: Converts the value to the base unit.
    """

    console: str | None
    gauge: str
    meaning: str
    factor: float = 1


METRIC_FORMATS = {
    "learning rate": MetricFormat(
        console="lr {:.2e}", gauge="learning_rate", meaning="learning rate of the last step"
    ),
    "grad norm": MetricFormat(
        console="grad norm {:.3f}", gauge="grad_norm", meaning="gradient norm before clipping"
    ),
    "params norm": MetricFormat(
        console="params norm {:.3f}", gauge="params_norm", meaning="norm of the trained weights"
    ),
    "zeros in grad": MetricFormat(
        console="{:,.0f} zeros in grad", gauge="zeros_in_grad", meaning="zeros in the gradient"
    ),
    "loss scale": MetricFormat(
        console="loss scale {:g}", gauge="loss_scale", meaning="factor of the fp16 loss"
    ),
    "tokens per second": MetricFormat(
        console="{:,.0f} tokens/s",
        gauge="tokens_per_second",
        meaning="tokens per second of all processes",
    ),
    "TFLOP/s per process": MetricFormat(
        console="{:.3g} TFLOP/s",
        gauge="process_flops",
        meaning="model FLOP/s of a process",
        factor=1e12,
    ),
    "MFU": MetricFormat(
        console="{:.1%} MFU", gauge="mfu_ratio", meaning="fraction of the device's peak"
    ),
    "peak memory GB": MetricFormat(
        console="{:.2f} GB",
        gauge="peak_memory_bytes",
        meaning="peak memory, the maximum over ranks",
        factor=1e09,
    ),
    "joules per step": MetricFormat(
        console="{:,.0f} J", gauge="step_joules", meaning="energy of a step over all GPUs"
    ),
    "watts per GPU": MetricFormat(
        console="{:,.0f} W", gauge="gpu_watts", meaning="mean power of a GPU"
    ),
    "skipped steps": MetricFormat(
        console="{} skipped", gauge="skipped_steps", meaning="steps without an update so far"
    ),
    "step time": MetricFormat(console=None, gauge="step_seconds", meaning="mean time of a step"),
    "batch size": MetricFormat(console=None, gauge="batch_samples", meaning="samples of a step"),
    "consumed samples": MetricFormat(
        console=None, gauge="consumed_samples", meaning="training samples so far"
    ),
    "consumed tokens": MetricFormat(
        console=None, gauge="consumed_tokens", meaning="training tokens so far"
    ),
    "data wait": MetricFormat(
        console=None,
        gauge="data_wait_seconds",
        meaning="mean time of a step in which the slowest rank waits for data",
    ),
    "memory GB": MetricFormat(
        console=None,
        gauge="memory_bytes",
        meaning="memory in use, the maximum over ranks",
        factor=1e09,
    ),
    "reserved memory GB": MetricFormat(
        console=None,
        gauge="reserved_memory_bytes",
        meaning="memory of the allocator, the maximum over ranks",
        factor=1e09,
    ),
}
"""Metric -> how it is shown, in the order of the console."""
