# SPDX-License-Identifier: Apache-2.0
"""The text model inside a multimodal checkpoint, converted under the checkpoint's own names.

What is not text stays as it is: it is neither built nor trained, and an export takes it over from its source.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

from megatron.bridge.models.conversion.declare.fields import IRRELEVANT, unknown_keys
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, MegatronModelBridge, as_dict, bridge_for
from megatron.bridge.models.hf_pretrained import PreTrainedCausalLM
from megatron.bridge.models.hf_pretrained.quantized_checkpoint import without_quantization
from megatron.bridge.utils.errors import UserError

_TEXT, _TIED = "text_config", "tie_word_embeddings"


class TextPartBridge(DecoderBridge):
    """A bridge that reads ``text_config`` as the text model's own does; ``carried`` names the other parts."""

    texts: ClassVar[dict[str, str]] = {}
    """``model_type`` of the text config -> the architecture whose bridge reads it."""
    other_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of the whole config that describe the other parts."""

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """The provider of the text model.

        Raises:
            UserError: a key of either config is unknown, missing, or cannot be represented.
        """
        whole = as_dict(hf_pretrained.config)
        self._check(whole)
        raw = hf_pretrained.raw_config if isinstance(hf_pretrained, PreTrainedCausalLM) else whole
        text = SimpleNamespace(config=_text(whole) | {_TIED: _is_tied(raw)})
        return self._text_bridge(whole).provider_bridge(text)

    def megatron_to_hf_config(self, provider: Any) -> dict[str, Any]:
        """Nothing: a provider does not know the other parts."""
        return {}

    def changed_config(self, provider: Any, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """The text config with what has changed; that embeddings are tied is for the whole config to say."""
        changed = self._text_bridge(hf_config).changed_config(provider, _text(hf_config))
        changed.pop("dtype", None)
        whole = {_TIED: changed.pop(_TIED)} if _TIED in changed else {}
        return whole | ({_TEXT: {**hf_config[_TEXT], **changed}} if changed else {})

    def _text_bridge(self, whole: Mapping[str, Any]) -> MegatronModelBridge:
        return bridge_for(SimpleNamespace(architectures=[self.texts[whole[_TEXT]["model_type"]]]))

    def _check(self, whole: Mapping[str, Any]) -> None:
        kind = whole[_TEXT].get("model_type")
        known = (_TEXT, _TIED, "dtype", *self.other_keys)
        own = {key: value for key, value in without_quantization(whole).items() if key not in known}
        problems = unknown_keys((), own, {**IRRELEVANT, **self.irrelevant})
        if kind not in self.texts:
            problems.append(f"{_TEXT}.model_type={kind!r} is not supported: {' and '.join(self.texts)} are")
        if problems:
            raise UserError(f"config of {self._architecture}: {'; '.join(problems)}")


def _text(whole: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's config, with what the whole config says about all parts."""
    text = whole[_TEXT]
    return {**text, "dtype": whole.get("dtype") or text.get("dtype"), _TIED: whole.get(_TIED, False)}


def _is_tied(raw: Mapping[str, Any]) -> bool:
    """Whether embeddings are tied, as ``config.json`` spells it; where it does not, they are not.

    Published configs leave the key out; transformers then takes them for tied, and unties them again when it finds
    that they are stored with different numbers.
    """
    return raw.get(_TIED, raw.get(_TEXT, {}).get(_TIED, False))
