"""Network links between replicas, on which KV is copied."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class KvLinks:
    """A link per replica, full duplex: it sends a transfer at a time, and receives another. A
    transfer occupies both ends for `latency_s` + bytes / `bytes_per_s`.

    `sent_bytes` and `received_bytes` are by replica, `busy_s` is the time that replicas sent.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    sent_bytes: dict[int, float] = field(default_factory=dict)
    received_bytes: dict[int, float] = field(default_factory=dict)
    busy_s: dict[int, float] = field(default_factory=dict)
    _senders: set[int] = field(default_factory=set)
    _receivers: set[int] = field(default_factory=set)

    def is_free(self, source: int, target: int) -> bool:
        """Whether a transfer between two replicas can begin now."""
        return source not in self._senders and target not in self._receivers

    def begin(self, source: int, target: int, n_bytes: float, least_s: float = 0.0) -> float:
        """Begin a transfer, which takes `least_s` or more because its bytes are not all there yet;
        returns the seconds until its `end`."""
        assert self.is_free(source, target), f"the link from {source} to {target} is busy"
        self._senders.add(source)
        self._receivers.add(target)
        took_s = self.latency_s + max(n_bytes / self.bytes_per_s, least_s)
        for count, replica in ((self.sent_bytes, source), (self.received_bytes, target)):
            count[replica] = count.get(replica, 0.0) + n_bytes
        self.busy_s[source] = self.busy_s.get(source, 0.0) + took_s
        return took_s

    def abort(self, source: int, target: int, n_bytes: float, left_s: float) -> None:
        """End a transfer `left_s` early, with `n_bytes` that were not sent."""
        for count, replica in ((self.sent_bytes, source), (self.received_bytes, target)):
            count[replica] -= n_bytes
        self.busy_s[source] -= left_s
        self.end(source, target)

    def end(self, source: int, target: int) -> None:
        self._senders.remove(source)
        self._receivers.remove(target)
