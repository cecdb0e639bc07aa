# SPDX-License-Identifier: Apache-2.0
"""Whether the code of a repository may run."""


def is_safe_repo(hf_path: str, trust_remote_code: bool | None) -> bool:
    """Return ``trust_remote_code``; None trusts no repository, whoever owns it."""
    del hf_path
    return bool(trust_remote_code)
