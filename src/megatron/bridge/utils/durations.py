# SPDX-License-Identifier: Apache-2.0
"""Durations in words."""

from datetime import datetime, timedelta


def remaining(left: timedelta, now: datetime) -> str:
    """The time until the end of a run, and the end in local time if that is more than a minute away.

    Example:
        >>> remaining(timedelta(hours=30), datetime(2026, 1, 2, 22, 15))
        '1 day, 6:00:00 left, ends Sun Jan 4 04:15'
    """
    if left < timedelta(minutes=1):
        return f"{left} left"
    end = now + left
    day = "" if end.date() == now.date() else f"{end:%a %b} {end.day} "
    return f"{left} left, ends {day}{end:%H:%M}"
