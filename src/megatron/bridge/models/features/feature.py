# SPDX-License-Identifier: Apache-2.0
"""What a layer feature is: one object that knows its settings, its layers, its costs and its toy sizes.

A feature is a subclass of ``LayerFeature``, mostly in a module of its own, and a row of ``registry.FEATURES``. All
methods have defaults that change nothing, so a feature defines only what it has. ``config`` is a provider: the copy
that ``resolved`` makes, except that ``check`` is also asked of the declared one, whose ``backend`` may be ``auto``.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

Pricing = Literal["counted", "modules", "numbers", "unpriced"]
"""How a prediction of memory and time knows a setting.

``counted``: another value changes the prediction, as a test shows. ``modules``: the modules that a rank builds are
counted with it. ``numbers``: it changes numbers, not the work. ``unpriced``: it changes memory or time of a run, and
the prediction does not know it; a dry run says so.
"""


@dataclass(frozen=True)
class ToySizes:
    """Sizes of the small model of a rehearsal."""

    hidden_size: int
    head_dim: int
    query_heads: int
    query_groups: int  # heads of keys and values, without padding
    vocab_size: int
    seq_length: int
    tensor: int  # tensor-parallel ranks
    context: int  # context-parallel ranks

    @property
    def head_ranks(self) -> int:
        """Ranks that heads are shared out to."""
        return self.tensor * self.context


class LayerFeature:
    """A feature of decoder layers that can be on or off.

    Its settings are fields of the provider. Those that Megatron-Core lacks are declared in a dataclass that
    ``registry.FeatureFields`` inherits from, so that they have flat names.

    Attributes:
        switches: Field -> its value in a model without the feature.
        plain_layers_only: A hybrid model, and one whose layers are described one by one, cannot have the feature.
        per_layer: Fields that have a number for each layer, as a list.
        needs: Setting -> the field without which it has no effect.
        prefixes: Beginnings of settings that have no effect unless this feature, or another one with the same
            prefix, is on.
        prefix_switch: The field that is on if ``prefixes`` have an effect.
        prefix_value: The value that this field must have; None is any that is on.
        pricing: Setting -> how a prediction knows it; a name may end in ``*``.
        scales_with_width: Settings that a model with another ``hidden_size`` usually changes as well.
        modules: Classes of the modules whose costs this feature counts, including their subclasses.
        replicated_layers: Names of linear layers that are whole on every tensor-parallel rank, and compute the
            tokens that sequence parallelism leaves on it.
        recurrent_modules: Classes of modules that remember earlier tokens in states of one size (``state_shapes``),
            which decoding caches.
    """

    switches: ClassVar[Mapping[str, Any]] = {}
    plain_layers_only: ClassVar[bool] = False
    per_layer: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[Mapping[str, str]] = {}
    prefixes: ClassVar[tuple[str, ...]] = ()
    prefix_switch: ClassVar[str] = ""
    prefix_value: ClassVar[Any] = None
    pricing: ClassVar[Mapping[str, Pricing]] = {}
    scales_with_width: ClassVar[tuple[str, ...]] = ()
    modules: ClassVar[tuple[type, ...]] = ()
    replicated_layers: ClassVar[tuple[str, ...]] = ()
    recurrent_modules: ClassVar[tuple[type, ...]] = ()

    def is_used(self, config: Any) -> bool:
        """Return whether ``config`` has the feature."""
        return any(getattr(config, name, off) != off for name, off in self.switches.items())

    # the model

    def check(self, config: Any) -> Iterator[str]:
        """Yield a sentence for each setting that the feature cannot be built with: key, value, rule, way out."""
        yield from ()

    def derive(self, config: Any) -> None:
        """Set fields of ``config`` that follow from the feature."""

    def change_layer_config(self, config: Any, original: Any, layer_number: int) -> None:
        """Change the config of one layer, if its sizes differ from those of others.

        Args:
            config: The copy that the layer is built with.
            original: The config of the model.
            layer_number: Counted from 1.
        """

    def change_layer_spec(
        self, spec: ModuleSpec, config: Any, layer_number: int | None, provider: BackendSpecProvider
    ) -> ModuleSpec:
        """Return the spec of a layer with the feature. Layers share specs: return a copy.

        Args:
            spec: Of a decoder layer, with the features that come before this one.
            config: The config of the model.
            layer_number: Counted from 1; None in a hybrid model, whose layers of a kind share a spec.
            provider: Chooses the classes of linear layers, norms and attention; it is that of a backend.
        """
        return spec

    def change_model(self, model: nn.Module, config: Any) -> None:
        """Change a built chunk, whose parameters have no values of a checkpoint yet."""

    # what it costs, on one rank

    def operations(self, module: Any, length: int) -> float:
        """Return the forward operations per token between the matrices of ``module``, one of ``modules``.

        Args:
            module: May be on the meta device.
            length: Tokens of a sequence.
        """
        return 0.0

    def keys_seen(self, config: Any, length: int) -> int | None:
        """Return how many of a sequence's ``length`` keys a query of attention sees at most; None is all."""
        return None

    def saved_elements(self, module: Any) -> int | None:
        """Return the elements per token that ``module`` saves for the backward pass, without its linear layers.

        None counts the module by its weight, like a linear layer or a norm.
        """
        return None

    def scan_elements(self, module: Any, tokens: int) -> int:
        """Return the fp32 elements that are in memory while ``module`` recomputes a scan in its backward pass."""
        return 0

    backward_scans: ClassVar[float] = 2.0
    """Time of the backward pass of a scan, in forward passes."""

    def scan_bytes(self, module: Any) -> float:
        """Return the bytes per token that the kernels of a scan write and read in its forward pass."""
        return 0.0

    def notes(self, config: Any) -> Iterator[str]:
        """Yield what a prediction of memory and time assumes or leaves out, for a dry run to say."""
        yield from ()

    # a rehearsal

    def has_periods(self, config: Any) -> bool:
        """Return whether the architecture's own config describes the layers by a period."""
        return False

    def toy_sizes(self, config: Any, toy: ToySizes) -> dict[str, Any]:
        """Return the settings of a small model, by field; ``config`` is the full one."""
        return {}


def differing(
    config: Any, harmless: Mapping[str, Any], context: str, with_remedy: bool = False
) -> Iterator[str]:
    """Yield a sentence for each setting that is not supported ``context``.

    Args:
        config: A provider.
        harmless: Setting -> the value with which it changes nothing.
        context: How a sentence goes on, such as ``with kda_layers``.
        with_remedy: Name the harmless value.
    """
    for name, value in harmless.items():
        given = getattr(config, name, value)
        if given != value:
            remedy = f": set model.{name}={value!r}" if with_remedy else ""
            yield f"{name}={given!r} is not supported {context}{remedy}"


def indivisible_sizes(config: Any, names: Iterable[str], needed_by: str) -> Iterator[str]:
    """Yield a sentence for each size that tensor-parallel ranks cannot split."""
    ranks = config.tensor_model_parallel_size
    for name in names:
        size = getattr(config, name)
        if not size or size % ranks:
            yield (
                f"tensor_model_parallel_size={ranks} does not divide {name}={size}, which {needed_by} needs"
            )


def indivisible_by_context(config: Any, names: Iterable[str], needed_by: str) -> Iterator[str]:
    """Yield a sentence for each size that the context-parallel ranks of a tensor-parallel one cannot share."""
    tensor = config.tensor_model_parallel_size
    context = config.context_parallel_size
    for name in names:
        size = getattr(config, name) or 0
        if context > 1 and size % tensor == 0 and size % (tensor * context):
            yield (
                f"context_parallel_size={context} x tensor_model_parallel_size={tensor} does not divide {name}="
                f"{size}, which {needed_by} needs"
            )


def average_keys(most: int, length: int) -> float:
    """Return the keys that a query sees on average, if each sees all before it and its own, but ``most`` at most."""
    return most - most * (most - 1) / (2 * length)


def kernels_note(package: str) -> str:
    """Return the sentence on a prediction for layers that are slow without the kernels of ``package``."""
    return f"activations assume the kernels of {package}; without them PyTorch stores several times as much"


@dataclass(frozen=True)
class Clash:
    """A setting that does not work with a feature."""

    setting: str
    value: Any
    reason: str  # and the way out


WITHOUT_WHOLE_LAYERS = (
    Clash("cuda_graph_impl", "local", "graphs of layers leave it out; use 'full_iteration'"),
    Clash(
        "overlap_moe_expert_parallel_comm",
        True,
        "it runs parts of layers without it; switch it off",
    ),
)
"""Settings that run parts of a layer, without what a feature adds around them."""

RECOMPUTED_LAYERS = Clash(
    "recompute_granularity",
    "full",
    "layers computed again would lose gradients of it; use 'selective'",
)
"""A layer that is recomputed by itself has no tensors of other modules."""


def clashes(config: Any, switch: str, settings: Iterable[Clash]) -> Iterator[str]:
    """Yield a sentence for each of ``settings``, if the field ``switch`` of a feature is on."""
    if not getattr(config, switch):
        return
    for clash in settings:
        if getattr(config, clash.setting) == clash.value:
            yield (
                f"{clash.setting}={clash.value!r} does not work with {switch}="
                f"{getattr(config, switch)}: {clash.reason}"
            )
