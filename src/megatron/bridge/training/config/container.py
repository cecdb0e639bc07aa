# SPDX-License-Identifier: Apache-2.0
"""``ConfigContainer``: everything that a run needs, and the one way from it to what runs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast

from megatron.bridge.data.config import MockGPTDatasetConfig
from megatron.bridge.training.config.batch_size import lengths
from megatron.bridge.training.config.resolve import Resolved, resolve
from megatron.bridge.training.config.resolve.findings import Hardware
from megatron.bridge.training.config.resolve.precision import without_quantization
from megatron.bridge.training.config.rules import LOCAL_RULES, RULES, SIZE_RULES, violations
from megatron.bridge.training.config.rules.fields import UNAVAILABLE
from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils import distributed
from megatron.bridge.utils.config.origins import Origins, non_defaults
from megatron.bridge.utils.config.serialize import copy_config, dump_yaml, load_yaml
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError, refuse


@dataclass(kw_only=True)
class ConfigContainer(RunConfig):
    """Everything that a run needs.

    A field whose default is None is derived. A value that you set is never replaced.

    Example:
        >>> config = ConfigContainer(train=..., model=..., ...)  # doctest: +SKIP
        >>> config.validate()  # doctest: +SKIP
    """

    UNAVAILABLE_KEYS: ClassVar[frozenset[str]] = frozenset(UNAVAILABLE)
    """Dotted keys that no message proposes."""

    def resolve(
        self,
        world_size: int | None = None,
        origins: Origins | None = None,
        count_rows: Callable[[Any], int] | None = None,
    ) -> "Resolved[ConfigContainer]":
        """A copy in which everything is derived and checked; this object stays as it is.

        Args:
            world_size: Number of processes of a run on another machine, about which nothing is known; None means
                this job, on this machine.
            origins: Where the values came from, if that is known.
            count_rows: Counts the rows of an epoch of a config, for ``train.num_epochs``, as
                ``training.setup.count_rows``. Without it ``train.train_iters`` stays as it is.

        Raises:
            UserError: one line for each problem, all of them together.
        """
        hardware = Hardware.detect(runs_here=world_size is None)
        world_size = distributed.world_size() if world_size is None else world_size
        refuse(violations(SIZE_RULES, self, world_size))
        resolved = resolve(self, world_size, hardware, origins, count_rows)
        config = resolved.config
        rules = (*RULES, *LOCAL_RULES) if hardware.runs_here else RULES
        refuse(
            [*resolved.problems, *config.dataset.problems(), *violations(rules, config, world_size)]
        )
        _check_model(config.model, hardware)
        return cast("Resolved[ConfigContainer]", resolved)

    def validate(self, world_size: int | None = None) -> list[str]:
        """Check everything, and change nothing.

        If ``dataset`` is None, the config is that of a program with its own loop, and what its blocks
        leave open is filled in.

        Args:
            world_size: As for ``resolve``.

        Returns:
            A sentence for each value that a run would replace.

        Raises:
            UserError: one line for each problem, all of them together.
        """
        foreign = cast(Any, self.dataset) is None
        return (
            _complete_for_own_loop(self, world_size) if foreign else self.resolve(world_size)
        ).notes

    def to_yaml(self) -> str:
        """The config as YAML that ``from_yaml`` reads back exactly."""
        return dump_yaml(self)

    @classmethod
    def from_yaml(cls, text: str, trust: bool = False) -> "ConfigContainer":
        """The config that ``to_yaml`` wrote.

        Args:
            trust: Import your own classes and functions that it names, which can run code.

        Raises:
            UserError: the YAML has unknown keys or names, or is not a complete config.
        """
        config = load_yaml(text, trust=trust)
        if not isinstance(config, cls):
            raise UserError(f"the YAML holds a {type(config).__name__}, not a {cls.__name__}")
        return config

    def log_non_default_values(self, origins: Origins | None = None) -> None:
        """Print the settings that differ from their defaults, and where their values came from."""
        for line in non_defaults(self, origins):
            console().print(line, markup=False)

    def print_yaml(self) -> None:
        console().print(self.to_yaml(), markup=False)


def _check_model(model: Any, hardware: Hardware) -> None:
    """Let Megatron-Core check the model; it cannot check FP8 on a machine without Transformer Engine."""
    try:
        (model if hardware.runs_here else without_quantization(model)).finalize()
    except (ValueError, AssertionError) as error:
        raise UserError(f"model: {error}") from error


def _complete_for_own_loop(config: Any, world_size: int | None) -> Resolved[Any]:
    """Check the config of a program with its own loop and data (docs/rl.md), and fill in what it leaves open.

    Such programs set every field whatever the model is, so settings of features that are off become notes.

    Raises:
        UserError: one line for each problem, all of them together.
    """
    checked: Any = copy_config(config)
    checked.dataset = MockGPTDatasetConfig(seq_length=config.model.seq_length)
    notes = list(_unset_ineffective(checked))
    resolved, config.optimizer.params_dtype = checked.resolve(world_size), None
    resolved.notes.extend(notes)
    for name in ("ddp", "optimizer", "scheduler"):
        block = getattr(config, name)
        derived = getattr(resolved.config, name)
        for entry in fields(block):
            if getattr(block, entry.name) is None:
                setattr(block, entry.name, getattr(derived, entry.name))
    config.scheduler.lengths = lengths(resolved.config)
    return resolved


def _unset_ineffective(config: Any) -> Iterator[str]:
    """Unset what has no effect, and say so."""
    for block, name, off, why in (
        (
            "model",
            "expert_tensor_parallel_size",
            not config.model.num_moe_experts,
            "the model has no experts",
        ),
        (
            "ddp",
            "data_parallel_sharding_strategy",
            not config.ddp.use_megatron_fsdp,
            "weights are not sharded",
        ),
        ("optimizer", "params_dtype", True, "it follows the model"),
        (
            "checkpoint",
            "save_interval",
            config.checkpoint.save is None,
            "checkpoint.save is not set yet",
        ),
    ):
        if off and getattr(getattr(config, block), name) is not None:
            setattr(getattr(config, block), name, None)
            yield f"{block}.{name} has no effect: {why}"
