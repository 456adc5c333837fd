# SPDX-License-Identifier: Apache-2.0
"""A device that speaks ADB: messages worked by hand, and the clients of other people."""

import io
import shutil
import socket
import subprocess
import time

import pytest
from whet_environments.devices.adb_server import (
    MAX_STREAMS,
    AdbMessage,
    AdbServer,
    read_message,
    run_service,
    run_shell,
)
from whet_environments.devices.drawn import CARDS_X, CARDS_Y, COLOURS, NEXT, DrawnNumberGame

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 2000  # longer than one message


class Recorder:
    size = (720, 1280)

    def __init__(self):
        self.done = []

    def png(self):
        return PNG

    def tap(self, x, y):
        self.done.append((x, y))

    def key(self, code):
        if code == "BROKEN":
            raise RuntimeError("no such key")
        self.done.append(code)

    def open(self, url):
        self.done.append(url)


def test_a_message_has_the_bytes_worked_by_hand():
    # "OKAY" is 4f 4b 41 59; inverted b0 b4 be a6; "ab" sums to 0x61 + 0x62 = 0xc3
    packed = AdbMessage(b"OKAY", 1, 2, b"ab").pack()
    assert packed == bytes.fromhex("4f4b4159 01000000 02000000 02000000 c3000000 b0b4bea6 6162")


def test_shell_v2_packs_output_and_exit_code():
    # wm size prints 24 bytes in a packet 1, then packet 3 has one byte: code 0
    out = b"Physical size: 720x1280\n"
    assert run_service("shell,v2,raw:wm size", Recorder()) == b"\x01\x18\0\0\0" + out + b"\x03\x01\0\0\0\0"
    assert run_service("exec:wm size", Recorder()) == out
    assert run_service("sync:", Recorder()) is None


def test_bad_commands_name_the_command_and_the_others():
    assert run_shell(Recorder(), "rm -r /").code == 127
    assert "no command 'rm -r /'; expected screencap -p" in run_shell(Recorder(), "rm -r /").error
    assert "RuntimeError: no such key" in run_shell(Recorder(), "input keyevent BROKEN").error
    assert run_shell(Recorder(), "input tap 1 two").code == 1
    assert run_shell(Recorder(), "input 'tap").code == 1


def test_am_start_opens_an_address_and_echo_tells_the_status():
    screen = Recorder()
    line = "am start -a android.intent.action.VIEW -d 'http://127.0.0.1:1/page.html?seed=1&rounds=2'"
    out = run_service(f"shell:{line}", screen)
    assert out.startswith(b"Starting: Intent { -a android.intent.action.VIEW -d http://127.0.0.1:1/page.html?seed=1")
    assert run_shell(screen, "am start -n com.game/.Main -d").code == 0
    assert screen.done == ["http://127.0.0.1:1/page.html?seed=1&rounds=2"]
    assert run_service("shell:echo  ok", screen) == b"ok\n"
    assert run_service("shell:wm size; echo EXIT:$?", screen) == b"Physical size: 720x1280\nEXIT:0\n"
    assert run_service("shell:rm x; echo EXIT:$?", screen).endswith(b"echo or getprop\nEXIT:127\n")
    assert run_service("exec:dumpsys display", screen) == b"DisplayViewport{type=INTERNAL, orientation=0}\n"


def test_properties():
    assert run_service("shell:getprop ro.product.model", Recorder()) == b"whet\n"
    assert run_service("shell:getprop ro.none", Recorder()) == b"\n"
    assert b"[ro.build.version.sdk]: [33]\n" in run_service("shell:getprop", Recorder())


def test_a_port_is_forwarded_to_itself_only():
    assert run_service("reverse:forward:tcp:5;tcp:5", Recorder()) == b"OKAY"
    assert run_service("reverse:killforward:tcp:5", Recorder()) == b"OKAY"
    said = run_service("reverse:forward:tcp:5;tcp:6", Recorder())
    assert said.startswith(b"FAIL") and int(said[4:8], 16) == len(said) - 8 and b"expected tcp:PORT tcp:PORT" in said


def ends(client):
    """Tells whether the device closes the connection, and after how many seconds."""
    start = time.monotonic()
    try:
        while client.recv(65536):
            pass
    except ConnectionError:
        pass
    return time.monotonic() - start


def test_a_client_that_stalls_is_dropped():
    connect = AdbMessage(b"CNXN", 0x01000000, 4096, b"host::\0").pack()
    with AdbServer(Recorder(), stall_seconds=0.3) as device:
        for part in (connect[:1], connect[:24], connect + AdbMessage(b"OPEN", 7, 0, b"exec:wm size\0").pack()[:30]):
            with socket.create_connection(("127.0.0.1", device.port), 10) as client:
                client.sendall(part)
                assert 0.2 < ends(client) < 30.0
        drips = socket.create_connection(("127.0.0.1", device.port), 10)  # a byte at a time
        with drips as client, pytest.raises(ConnectionError):
            for _ in range(100):
                client.sendall(b"C")
                time.sleep(0.05)


def test_a_client_that_does_not_read_is_dropped_and_the_device_goes_on():
    with AdbServer(Recorder(), stall_seconds=0.3) as device:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(10)
            client.connect(("127.0.0.1", device.port))
            client.sendall(AdbMessage(b"CNXN", 0x01000000, 256 * 1024, b"host::\0").pack())
            with pytest.raises(OSError):
                for number in range(1, 2000):
                    client.sendall(AdbMessage(b"OPEN", number, 0, b"exec:screencap -p\0").pack())
                    time.sleep(0.001)
        with socket.create_connection(("127.0.0.1", device.port), 10) as client:
            client.sendall(AdbMessage(b"CNXN", 0x01000000, 4096, b"host::\0").pack())
            assert read_message(client).command == b"CNXN"


def test_too_many_streams_are_refused():
    with AdbServer(Recorder()) as device, socket.create_connection(("127.0.0.1", device.port), 10) as client:
        client.sendall(AdbMessage(b"CNXN", 0x01000000, 4096, b"host::\0").pack())
        read_message(client)
        for number in range(1, MAX_STREAMS + 2):
            client.sendall(AdbMessage(b"OPEN", number, 0, b"exec:wm size\0").pack())
            first = read_message(client)
            if number <= MAX_STREAMS:
                assert first.command == b"OKAY" and read_message(client).command == b"WRTE"
        assert first == (b"CLSE", 0, MAX_STREAMS + 1, b"")


def test_a_stream_waits_for_each_confirmation():
    with AdbServer(Recorder()) as device, socket.create_connection(("127.0.0.1", device.port), 10) as client:
        client.sendall(AdbMessage(b"CNXN", 0x01000000, 4096, b"host::\0").pack())
        assert b"features=shell_v2,cmd" in read_message(client).data
        client.sendall(AdbMessage(b"OPEN", 7, 0, b"exec:screencap -p\0").pack())
        assert read_message(client) == (b"OKAY", 1, 7, b"")
        got = b""
        while (message := read_message(client)).command == b"WRTE":
            assert len(message.data) <= 4096
            got += message.data
            client.sendall(AdbMessage(b"OKAY", 7, 1).pack())
        assert message == (b"CLSE", 1, 7, b"") and got == PNG


def test_no_adb_client_ends_only_its_own_connection():
    with AdbServer(Recorder()) as device:
        with socket.create_connection(("127.0.0.1", device.port), 10) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: nobody\r\n\r\n")
            with pytest.raises(ConnectionError):
                read_message(client)
        with socket.create_connection(("127.0.0.1", device.port), 10) as client:
            client.sendall(AdbMessage(b"CNXN", 0x01000000, 4096, b"host::\0").pack())
            assert read_message(client).command == b"CNXN"


def test_adb_shell_drives_the_device():
    module = pytest.importorskip("adb_shell.adb_device", reason="needs adb-shell: pip install adb-shell")
    screen = Recorder()
    with AdbServer(screen) as device:
        client = module.AdbDeviceTcp("127.0.0.1", device.port, default_transport_timeout_s=10)
        assert client.connect()
        assert client.shell("wm size") == "Physical size: 720x1280\n"
        client.shell("input tap 135 905")
        assert client.exec_out("screencap -p", decode=False) == PNG
        client.close()
    assert screen.done == [(135, 905)]


@pytest.mark.skipif(shutil.which("adb") is None, reason="needs adb: apt-get install adb")
def test_debian_adb_drives_the_device():
    screen = Recorder()

    def adb(*words):
        return subprocess.run(["adb", *words], capture_output=True, timeout=30, check=True).stdout

    with AdbServer(screen) as device:
        assert b"connected to" in adb("connect", device.serial)
        try:
            assert adb("-s", device.serial, "shell", "wm size") == b"Physical size: 720x1280\n"
            adb("-s", device.serial, "shell", "input", "tap", "360", "1070")
            adb("-s", device.serial, "shell", "input", "keyevent", "KEYCODE_BACK")
            assert adb("-s", device.serial, "exec-out", "screencap", "-p") == PNG
        finally:
            adb("disconnect", device.serial)
    assert screen.done == [(360, 1070), "KEYCODE_BACK"]


def test_ten_rounds_by_adb_taps_on_the_drawn_screen():
    image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install pillow")
    screen = DrawnNumberGame(seed=3)
    for _ in range(10):
        right = screen.game.cards.index(screen.game.right_card)
        taken = CARDS_X[right]
        assert image.open(io.BytesIO(screen.png())).getpixel((taken - 80, CARDS_Y)) == COLOURS["card"]
        run_shell(screen, f"input tap 360 {NEXT[1]}")  # nothing is taken yet: no change
        run_shell(screen, f"input tap {taken} {CARDS_Y}")
        assert image.open(io.BytesIO(screen.png())).getpixel((taken - 80, CARDS_Y)) == COLOURS["green"]
        run_shell(screen, "input tap 360 1070")
    assert (screen.score, screen.game.num_played) == (200, 10)


def test_a_wrong_card_costs_ten():
    screen = DrawnNumberGame(seed=3)
    screen.tap(CARDS_X[(screen.game.cards.index(screen.game.right_card) + 1) % 3], CARDS_Y)
    assert (screen.score, screen.is_right) == (90, False)
    screen.tap(*NEXT)
    assert (screen.score, screen.taken) == (90, None)
