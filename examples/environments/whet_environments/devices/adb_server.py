# SPDX-License-Identifier: Apache-2.0
"""The device side of the ADB protocol over TCP, without authentication, in front of a `Screen`."""

from __future__ import annotations

import re
import shlex
import socket
import socketserver
import struct
import threading
import time
from collections import deque
from types import TracebackType
from typing import NamedTuple, Protocol

VERSION = 0x01000000  # of the protocol; from 0x01000001 on, the check sum of a message is not sent
MAX_DATA = 256 * 1024  # bytes of one message
IDLE_SECONDS = 3600.0  # a connection that is silent for longer is closed
STALL_SECONDS = 10.0  # so is one that stops in the middle of a message, or does not read what it asked for
MAX_STREAMS = 64  # of a connection; output waits in memory until the client confirms it
HEADER = struct.Struct("<4sIIIII")  # command, two arguments, length, check sum, command with all bits inverted
STDOUT, STDERR, EXIT = 1, 2, 3  # the packets of shell_v2
PROPERTIES = {
    "ro.product.name": "whet",
    "ro.product.model": "whet",
    "ro.product.device": "whet",
    "ro.build.version.release": "13",
    "ro.build.version.sdk": "33",
}
ECHO_STATUS = re.compile(r"(.*);\s*echo (\S*)\$\?", re.DOTALL)
COMMANDS = (
    "screencap -p, input tap X Y, input keyevent CODE, wm size, am start -d URL, dumpsys display, echo or getprop"
)


class Screen(Protocol):
    """The screen of a device: pixels to read and places to tap."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        ...

    def png(self) -> bytes:
        """The screen as a PNG file."""
        ...

    def tap(self, x: int, y: int) -> None:
        """Touches the pixel (x, y)."""
        ...

    def key(self, code: str) -> None:
        """Presses a key, named as in `input keyevent`."""
        ...

    def open(self, url: str) -> None:
        """Shows a page."""
        ...


class AdbMessage(NamedTuple):
    """One message of the protocol."""

    command: bytes
    arg0: int
    arg1: int
    data: bytes = b""

    def pack(self) -> bytes:
        """The header of 24 bytes and the data."""
        inverted = int.from_bytes(self.command, "little") ^ 0xFFFFFFFF
        check_sum = sum(self.data) & 0xFFFFFFFF
        return HEADER.pack(self.command, self.arg0, self.arg1, len(self.data), check_sum, inverted) + self.data


class Result(NamedTuple):
    """Output and exit code of a shell command."""

    out: bytes = b""
    error: str = ""
    code: int = 0


def read_message(connection: socket.socket, stall_seconds: float = STALL_SECONDS) -> AdbMessage:
    """Reads a message: waits for its first byte as long as the socket does, then `stall_seconds` for the whole.

    Raises: ConnectionError at the end of the stream; TimeoutError on a stall; ValueError on a malformed header."""
    idle_seconds = connection.gettimeout()
    first = _read(connection, 1, None)
    end = time.monotonic() + stall_seconds
    try:
        command, arg0, arg1, length, _, inverted = HEADER.unpack(first + _read(connection, HEADER.size - 1, end))
        if inverted != int.from_bytes(command, "little") ^ 0xFFFFFFFF or length > MAX_DATA:
            raise ValueError(
                f"the header of an ADB message has command {command!r}, length {length} and magic {inverted:#x}; "
                f"expected at most {MAX_DATA} bytes and the inverted command; connect with an ADB client"
            )
        return AdbMessage(command, arg0, arg1, _read(connection, length, end))
    finally:
        connection.settimeout(idle_seconds)


def _read(connection: socket.socket, size: int, end: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        if end is not None:
            connection.settimeout(max(0.001, end - time.monotonic()))
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise ConnectionError("the ADB client closed the connection")
        data += chunk
    return bytes(data)


def run_shell(screen: Screen, line: str) -> Result:
    """Runs one command of the device's shell on the screen; a command that it does not have ends with code 127."""
    if asked := ECHO_STATUS.fullmatch(line):  # how clients of the first protocol learn the exit code
        result = run_shell(screen, asked[1])
        return Result(result.out + result.error.encode() + f"{asked[2]}{result.code}\n".encode())
    try:
        words = shlex.split(line)
        match words:
            case ["screencap", "-p"]:
                return Result(screen.png())
            case ["input", "tap", x, y]:
                screen.tap(int(x), int(y))
                return Result()
            case ["input", "keyevent", code]:
                screen.key(code)
                return Result()
            case ["wm", "size"]:
                width, height = screen.size
                return Result(f"Physical size: {width}x{height}\n".encode())
            case ["am", "start", *rest]:
                if "-d" in rest[:-1]:
                    screen.open(rest[rest.index("-d") + 1])
                return Result(f"Starting: Intent {{ {' '.join(rest)} }}\n".encode())
            case ["dumpsys", "display"]:
                return Result(b"DisplayViewport{type=INTERNAL, orientation=0}\n")
            case ["echo", *rest]:
                return Result(f"{' '.join(rest)}\n".encode())
            case ["getprop", name]:
                return Result(f"{PROPERTIES.get(name, '')}\n".encode())
            case ["getprop"]:
                return Result("".join(f"[{name}]: [{value}]\n" for name, value in PROPERTIES.items()).encode())
    except Exception as error:  # the screen is the code of a game
        return Result(error=f"{line!r} failed: {type(error).__name__}: {error}\n", code=1)
    return Result(
        error=f"the device has no command {line!r}; expected {COMMANDS}\n",
        code=127,
    )


def run_service(service: str, screen: Screen) -> bytes | None:
    """Runs a service and returns its output; None for a service that the device does not have."""
    kind, _, line = service.partition(":")
    name, *options = kind.split(",")
    if name == "reverse":
        return _reverse(line)
    if name not in ("shell", "exec"):
        return None
    result = run_shell(screen, line)
    error = result.error.encode()
    if "v2" in options:
        packets = [(STDOUT, result.out), (STDERR, error), (EXIT, bytes([result.code]))]
        return b"".join(struct.pack("<BI", number, len(data)) + data for number, data in packets if data)
    return result.out + error


def _reverse(line: str) -> bytes:
    """Answers `adb reverse`: the device is on the machine of its client, so a port leads to itself and to no other."""
    verb, _, ports = line.partition(":")
    source, _, target = ports.partition(";")
    if verb in ("killforward", "killforward-all") or (
        verb == "forward" and source.startswith("tcp:") and source == target
    ):
        return b"OKAY"
    message = f"the device forwards a port only to the same port; expected tcp:PORT tcp:PORT, found {line!r}".encode()
    return b"FAIL%04x%s" % (len(message), message)


class _Connection(socketserver.BaseRequestHandler):
    """A client: a stream sends its next message when the client has confirmed the one before."""

    server: _Server

    def handle(self) -> None:
        self._streams: dict[int, tuple[int, deque[bytes]]] = {}  # our number -> the client's number, what is left
        self._max_data = 4096
        self._num_opened = 0
        self.request.settimeout(IDLE_SECONDS)
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                self._answer(read_message(self.request, self.server.stall_seconds))
        except (OSError, ValueError):
            return  # the client has gone, or is no ADB client: the connection ends, the device stays

    def _answer(self, message: AdbMessage) -> None:
        command, arg0, arg1, data = message
        if command == b"CNXN":
            self._max_data = min(arg1, MAX_DATA)
            banner = ";".join(f"{name}={value}" for name, value in [*PROPERTIES.items()][:3])
            self._send(b"CNXN", VERSION, MAX_DATA, f"device::{banner};features=shell_v2,cmd".encode())
        elif command == b"OPEN":
            self._open(arg0, data.rstrip(b"\0").decode(errors="replace"))
        elif command == b"OKAY" and arg1 in self._streams:
            self._send_next(arg1)
        elif command == b"WRTE" and arg1 in self._streams:
            self._send(b"OKAY", arg1, arg0)
        elif command == b"CLSE":
            self._streams.pop(arg1, None)

    def _open(self, theirs: int, service: str) -> None:
        output = None
        if len(self._streams) < MAX_STREAMS:
            with self.server.lock:
                output = run_service(service, self.server.screen)
        if output is None:
            self._send(b"CLSE", 0, theirs)
            return
        self._num_opened += 1
        ours = self._num_opened
        size = max(1, self._max_data)
        self._streams[ours] = theirs, deque(output[i : i + size] for i in range(0, len(output), size))
        self._send(b"OKAY", ours, theirs)
        self._send_next(ours)

    def _send_next(self, ours: int) -> None:
        theirs, left = self._streams[ours]
        if left:
            self._send(b"WRTE", ours, theirs, left.popleft())
        else:
            del self._streams[ours]
            self._send(b"CLSE", ours, theirs)

    def _send(self, command: bytes, arg0: int, arg1: int, data: bytes = b"") -> None:
        idle_seconds = self.request.gettimeout()
        self.request.settimeout(self.server.stall_seconds)
        self.request.sendall(AdbMessage(command, arg0, arg1, data).pack())
        self.request.settimeout(idle_seconds)


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, screen: Screen, port: int, stall_seconds: float) -> None:
        self.screen, self.stall_seconds, self.lock = screen, stall_seconds, threading.Lock()
        super().__init__(("127.0.0.1", port), _Connection)


class AdbServer:
    """A device at 127.0.0.1:`port` (0: a free one) while the `with` block runs; `serial` is its name for adb."""

    def __init__(self, screen: Screen, port: int = 0, stall_seconds: float = STALL_SECONDS) -> None:
        self._server = _Server(screen, port, stall_seconds)
        self.port: int = self._server.server_address[1]
        self.serial = f"127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> AdbServer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10.0)
