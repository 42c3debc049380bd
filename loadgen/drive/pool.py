"""Idle connections of a client."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class Pooled(Protocol):
    """`remote` is the peer's address; `key` is the session that may use the connection (0: any)."""

    remote: str
    key: int


C = TypeVar("C", bound=Pooled)


class Pool(Generic[C]):
    """Idle connections by key.

    Addresses take turns; otherwise a few connections opened early would tie the traffic of a name
    to one of its servers. Of an address, the connection used last goes first, so that a server's
    idle timeout closes connections that are not needed.
    """

    def __init__(self) -> None:
        # {key: {address: stack}}, addresses in the order of their turns. Invariant: no stack and no
        # inner dict is empty.
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
        """Removes a connection that was closed while idle; ignores any other connection."""
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
