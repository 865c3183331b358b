"""Text messages over a WebSocket, as much of it as talking to a browser on this machine takes (RFC 6455)."""

import base64
import os
import socket
from urllib.parse import urlsplit

TEXT, CLOSE, PING, PONG = 1, 8, 9, 10
LONGER, LONGEST = 126, 127  # lengths that say how many bytes of length follow


class Messages:
    def __init__(self, url: str, timeout_s: float) -> None:
        where = urlsplit(url)
        self._socket = socket.create_connection((where.hostname, where.port), timeout_s)
        self._file = self._socket.makefile("rb")
        key = base64.b64encode(os.urandom(16)).decode()
        asked = (
            f"GET {where.path} HTTP/1.1\r\nHost: {where.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        self._socket.sendall(asked.encode())
        answer = self._file.readline()
        assert b" 101 " in answer, answer
        while self._file.readline().strip():
            pass

    def send(self, text: str, kind: int = TEXT) -> None:
        data, mask = text.encode(), os.urandom(4)
        num = len(data)
        if num < LONGER:
            size = bytes([0x80 | num])
        elif num < 1 << 16:
            size = bytes([0x80 | LONGER]) + num.to_bytes(2)
        else:
            size = bytes([0x80 | LONGEST]) + num.to_bytes(8)
        masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))
        self._socket.sendall(bytes([0x80 | kind]) + size + mask + masked)

    def receive(self) -> str:
        """The next message, its pieces put together."""
        parts = []
        while True:
            first, second = self._read(2)
            num = second & 0x7F
            if num in (LONGER, LONGEST):
                num = int.from_bytes(self._read(2 if num == LONGER else 8))
            data, kind = self._read(num), first & 0x0F
            if kind == CLOSE:
                raise ConnectionError("the browser closed the connection")
            if kind == PING:
                self.send(data.decode(), PONG)
            elif kind != PONG:
                parts.append(data)
                if first & 0x80:
                    return b"".join(parts).decode()

    def _read(self, num: int) -> bytes:
        data = self._file.read(num)
        if len(data) < num:
            raise ConnectionError("the browser went away")
        return data

    def close(self) -> None:
        self._file.close()
        self._socket.close()
