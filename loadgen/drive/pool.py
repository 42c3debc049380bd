"""Connections that wait for their next request."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class Pooled(Protocol):
    """`remote` is the address it is connected to, `key` who may have it (0: anybody)."""

    remote: str
    key: int


C = TypeVar("C", bound=Pooled)


class Pool(Generic[C]):
    """Idle connections by key. Addresses take turns, so that a few pre-opened connections do not
    pin a name's traffic to one of its servers; of one address, the connection used last goes first:
    the others may then be closed by a server that thinks them idle."""

    def __init__(self) -> None:
        # Invariant: no empty stack and no empty dict stays behind; the order of the addresses is
        # that of their turns.
        self._idle: dict[int, dict[str, list[C]]] = {}

    def put(self, connection: C) -> None:
        stacks = self._idle.setdefault(connection.key, {})
        stacks.setdefault(connection.remote, []).append(connection)

    def take(self, key: int) -> C | None:
        stacks = self._idle.get(key)
        if stacks is None:
            return None
        remote = next(iter(stacks))
        stack = stacks[remote]
        connection = stack.pop()
        if not stack:
            del stacks[remote]
            if not stacks:
                del self._idle[key]
        elif len(stacks) > 1:
            stacks[remote] = stacks.pop(remote)
        return connection

    def discard(self, connection: C) -> None:
        """Forget a connection that was closed while it waited; one that does not wait is none of
        ours."""
        stacks = self._idle.get(connection.key, {})
        stack = stacks.get(connection.remote, [])
        if connection not in stack:
            return
        stack.remove(connection)
        if not stack:
            del stacks[connection.remote]
            if not stacks:
                del self._idle[connection.key]

    def all(self) -> list[C]:
        return [c for stacks in self._idle.values() for stack in stacks.values() for c in stack]
