# SPDX-License-Identifier: Apache-2.0
"""Sessions of HTTP with the servers that training asks: judges, and engines that write completions."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import requests

_RETRIED_STATUS = (408, 409, 429, 500, 502, 503, 504)


def open_session(
    concurrency: int, api_key_variable: str, retries: int = 0, first_pause_seconds: float = 1.0
) -> "requests.Session":
    """Open a session for several threads.

    Args:
        concurrency: Requests that wait for a reply at the same time.
        api_key_variable: Environment variable with the key of the server, if it needs one.
        retries: How often a request that failed is repeated, although the server may have read it.
        first_pause_seconds: The pause before the second repetition; later ones double it.
    """
    import requests  # a quarter of a second, which runs without a server do not pay
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    retry = Retry(
        retries,
        backoff_factor=first_pause_seconds,
        status_forcelist=_RETRIED_STATUS,
        allowed_methods=None,  # also POST
        raise_on_status=False,
    )
    adapter = HTTPAdapter(pool_maxsize=concurrency, max_retries=retry)
    session = requests.Session()
    session.mount("http://", adapter)
    session.mount("https://", adapter)
    key = os.environ.get(api_key_variable)
    if key:
        session.headers["Authorization"] = f"Bearer {key}"
    return session
