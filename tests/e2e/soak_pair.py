"""The soak run's client of a prefill and a decode server: both get each request, as from SGLang's router, and each abort."""

from __future__ import annotations

from http.client import HTTPConnection, HTTPResponse

from pd_servers import BOOTSTRAP, DECODE, in_rooms
from soak_traffic import REQUEST_SECONDS, Client


class PairedConnection:
    """Two connections with one request; the decode server answers. Closing both takes the request back on both."""

    def __init__(self, prefill: HTTPConnection, decode: HTTPConnection):
        self._prefill, self._decode, self.sock = prefill, decode, decode.sock

    def getresponse(self) -> HTTPResponse:
        return self._decode.getresponse()

    def close(self) -> None:
        self._decode.close()
        self._prefill.close()


class PairClient(Client):
    """Calls both servers."""

    def __init__(self, port: int):
        """`port` is the prefill server's."""
        super().__init__(port + DECODE)
        self._prefill, self._bootstrap = Client(port), port + BOOTSTRAP

    def _send(self, path: str, body: dict | None, timeout: float) -> HTTPConnection | PairedConnection:
        if path != "/generate":
            return super()._send(path, body, timeout)
        whole = in_rooms(body, self._bootstrap)
        return PairedConnection(self._prefill._send(path, whole, timeout), super()._send(path, whole, timeout))

    def call(self, path: str, body: dict | None = None, timeout: float = REQUEST_SECONDS) -> bytes:
        """What is no request goes to one server after the other, and must succeed on both."""
        if path != "/generate":
            self._prefill.call(path, body, timeout)
        return super().call(path, body, timeout)
