# SPDX-License-Identifier: Apache-2.0
"""The class by which programs recognize models that pack and shard sequences in ``forward``: none here does."""


class Qwen3VLModel:
    """No model is an instance: callers pack and shard, for vision-language models, too."""
