"""A TCP proxy on loopback with the faults of a network. A fault may begin while the proxy runs."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading

_RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # l_onoff, l_linger of SO_LINGER: close sends RST
_POLL_S = 0.05


class FaultyNetwork:
    """Forwards connections to `upstream_port`. `fault` is one of

    ""           all bytes pass
    drop_syns    connections are neither accepted nor refused: the backlog is full
    half_open    connections are accepted, and nothing is ever sent on them
    cut_tls      closed in the handshake, after the first bytes of the client
    cut_middle   the connection ends after `n_bytes` of the server's answer
    reset_middle the same with a reset
    stall_middle the same without an end: the rest never comes

    A fault applies to connections made, and for those in the middle to answers begun, after it was
    set. With `tls` the proxy speaks TLS to its clients.
    """

    def __init__(
        self, upstream_port: int, n_bytes: int = 300, tls: ssl.SSLContext | None = None
    ) -> None:
        self.fault, self._tls = "", tls
        self._upstream_port, self._n_bytes = upstream_port, n_bytes
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> FaultyNetwork:
        self._threads[0].start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._open):
            end.close()

    def _accept(self) -> None:
        while not self._is_over.is_set():
            if self.fault == "drop_syns":
                self._fill_backlog()
                return
            if select.select([self._listener], [], [], _POLL_S)[0]:
                client, _ = self._listener.accept()
                self._open.append(client)
                self._threads.append(threading.Thread(target=self._serve, args=(client,)))
                self._threads[-1].start()

    def _fill_backlog(self) -> None:
        """Connects until the kernel takes no more; it drops further SYNs (tcp(7))."""
        while True:
            end = socket.socket()
            self._open.append(end)
            end.settimeout(0.5)
            try:
                end.connect(("127.0.0.1", self.port))
            except TimeoutError:
                return

    def _serve(self, client: socket.socket) -> None:
        if self.fault == "half_open":
            return
        with contextlib.suppress(OSError):  # an end of either side ends the connection
            if self.fault == "cut_tls":
                client.recv(16)
                client.close()
                return
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
                self._open.append(client)
            with socket.create_connection(("127.0.0.1", self._upstream_port)) as server:
                self._forward(client, server)
        client.close()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        n_left = self._n_bytes
        while not self._is_over.is_set():
            readable = select.select([client, server], [], [], _POLL_S)[0]
            if client in readable:
                if not (data := client.recv(1 << 16)):
                    return
                n_left = self._n_bytes
                server.sendall(data)
            if server in readable:
                if not (data := server.recv(1 << 16)):
                    return
                if self.fault.endswith("_middle") and len(data) >= n_left:
                    client.sendall(data[:n_left])
                    self._end_middle(client)
                    return
                n_left -= len(data)
                client.sendall(data)

    def _end_middle(self, client: socket.socket) -> None:
        if self.fault == "stall_middle":
            self._is_over.wait()
        elif self.fault == "reset_middle":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
