# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Ray behind one module: a torchrun on each node that a placement group reserves."""

import os
import signal
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed.run import main

from megatron.bridge.launchers.options import LaunchOptions
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.errors import UserError, one_line
from megatron.bridge.utils.processes import free_port


def launch(options: LaunchOptions) -> int:
    """Run until the end, as a driver of the cluster at ``RAY_ADDRESS``."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `ray job stop` sends it
    cpus = options.devices
    gpus = 0 if options.cpu else options.devices
    tasks: list[Any] = []
    try:
        ray.init(
            os.environ.get("RAY_ADDRESS", "auto"),
            logging_level="WARNING",
            runtime_env={"env_vars": options.env},
        )
        group = placement_group(
            [{"CPU": cpus, "GPU": gpus}] * options.nodes, strategy="STRICT_SPREAD"
        )
        print_rank_0(
            f"waiting for {options.nodes} nodes with {cpus} CPUs and {gpus} GPUs: see `ray status`"
        )
        places = [PlacementGroupSchedulingStrategy(group, node) for node in range(options.nodes)]
        meeting = ray.remote(lambda: f"{ray.util.get_node_ip_address()}:{free_port()}")
        endpoints = ray.get(
            [meeting.options(scheduling_strategy=strategy).remote() for strategy in places]
        )
        words = [f"--nnodes={options.nodes}", f"--nproc-per-node={cpus}"]
        words += [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoints[0]}",
            str(options.script.absolute()),
        ]
        torchrun = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(main)
        for node, strategy in enumerate(places):
            node_words = [
                f"--rdzv-conf=is_host={int(node == 0)}",
                f"--local-addr={endpoints[node].partition(':')[0]}",
            ]
            tasks.append(
                torchrun.options(scheduling_strategy=strategy).remote(
                    [*node_words, *words, *options.arguments]
                )
            )
        ray.get(tasks)
    except (ConnectionError, ray.exceptions.RayError) as error:
        raise UserError(
            f"--on ray: see the log above, and repeat the command: {one_line(error, 80)}"
        ) from error
    finally:
        for task in tasks:
            ray.cancel(task)
        ray.wait(tasks, num_returns=len(tasks)) if tasks else None
    return 0
