# SPDX-License-Identifier: Apache-2.0
"""Conditions on settings, of which rows of rules are made; as text, a condition is what a message says."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from megatron.bridge.training.config.rules.values import value_of
from megatron.bridge.training.config.run_config import RunConfig


class Condition(ABC):
    """Something that holds for a config or does not."""

    @abstractmethod
    def is_met(self, config: RunConfig) -> bool: ...

    @property
    def alternatives(self) -> "tuple[KeyCondition, ...]":
        """The conditions of which one is enough."""
        raise NotImplementedError


@dataclass(frozen=True)
class KeyCondition(Condition):
    """A condition on one setting, ``block.name``, or on whether a block is set."""

    key: str

    @property
    def alternatives(self) -> "tuple[KeyCondition, ...]":
        return (self,)


@dataclass(frozen=True)
class On(KeyCondition):
    """The setting is on, or not empty. The word ``none`` counts as off."""

    def is_met(self, config: RunConfig) -> bool:
        value = value_of(config, self.key)
        return bool(value) and value != "none"

    def __str__(self) -> str:
        return self.key


@dataclass(frozen=True)
class Equals(KeyCondition):
    value: Any

    def is_met(self, config: RunConfig) -> bool:
        return value_of(config, self.key) == self.value

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


@dataclass(frozen=True)
class Differs(KeyCondition):
    value: Any

    def is_met(self, config: RunConfig) -> bool:
        return value_of(config, self.key) != self.value

    def __str__(self) -> str:
        return f"{self.key}!={self.value}"


@dataclass(frozen=True)
class Exceeds(KeyCondition):
    """The setting is a number above ``bound``; a setting that is None does not exceed it."""

    bound: float

    def is_met(self, config: RunConfig) -> bool:
        value = value_of(config, self.key)
        return value is not None and value > self.bound

    def __str__(self) -> str:
        return f"{self.key} > {self.bound}"


class AnyOf(Condition):
    """At least one of several conditions is met."""

    def __init__(self, *conditions: KeyCondition) -> None:
        self._conditions = conditions

    @property
    def alternatives(self) -> tuple[KeyCondition, ...]:
        return self._conditions

    def is_met(self, config: RunConfig) -> bool:
        return any(condition.is_met(config) for condition in self._conditions)

    def __str__(self) -> str:
        return " or ".join(map(str, self._conditions))
