"""One unprivileged user id per live sandbox.

The kernel counts processes per user id: two sandboxes under one id would starve each other. An id
is held by an abstract socket, so processes of this machine never share one and a holder that is
killed gives its id back.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Iterator

from trueup.errors import EnvironmentFault

POOL = range(60706, 60962)
"""Ids that neither distributions nor systemd assign (systemd.io/UIDS-GIDS)."""


class UidPool:
    """Ids to lend, next in turn first, so that a retry gets another one."""

    def __init__(self, uids: range = POOL) -> None:
        self._lock = threading.Lock()
        offset = os.getpid() % len(uids)
        self._size = len(uids)
        self._turn = itertools.cycle([*uids[offset:], *uids[:offset]])

    @contextlib.contextmanager
    def lend(self) -> Iterator[int]:
        """A free id, for the time of the `with` block.

        Raises:
            EnvironmentFault: All are taken.
        """
        for _ in range(self._size):
            with self._lock:
                uid = next(self._turn)
            with socket.socket(socket.AF_UNIX) as holder:
                try:
                    holder.bind(f"\0trueup-uid-{uid}")
                except OSError:
                    continue
                yield uid
                return
        raise EnvironmentFault(
            field="start", rule=f"one of the pool's {self._size} user ids", value=None
        )
