"""TensorBoard events: a scalar a metric, under train/ or eval/.

The files are written here, without TensorBoard: importing its writer takes a tenth of a second and a hundred modules at the
start of every run, and keeps what it was given for up to two minutes, which a `kill -9` would cost. A file is records of
(length, its checksum, an event, its checksum); an event is a protocol buffer (tensorflow/core/util/event.proto), of which a
scalar needs six fields.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

VERSION = b"brain.Event:2"
LARGEST = 3.4028234e38  # that single precision has
opened = count()


class TensorBoard:
    def __init__(self, folder: Path, resumed_at: int | None):
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(opened)}"
        self.file = (folder / name).open("ab")
        self._event(0, _bytes(3, VERSION))
        if resumed_at is not None:  # what was written past the checkpoint is purged by TensorBoard when it reads this
            self._event(resumed_at + 1, _bytes(3, VERSION))
            self._event(resumed_at + 1, _bytes(7, _whole(1, 1)))  # session_log: START
        self.file.flush()

    def write(self, step: int, kind: str, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, int | float):
                value = max(-LARGEST, min(value, LARGEST))
                scalar = _bytes(1, f"{kind}/{name}".encode()) + struct.pack("<Bf", 2 << 3 | 5, value)
                self._event(step, _bytes(5, _bytes(1, scalar)))
        self.file.flush()

    def close(self) -> None:
        self.file.close()

    def _event(self, step: int, what: bytes) -> None:
        event = struct.pack("<Bd", 1 << 3 | 1, time.time()) + _whole(2, step) + what
        length = struct.pack("<Q", len(event))
        self.file.write(length + _checksum(length) + event + _checksum(event))


# --- protocol buffers: a field is its number and kind, then its content ---


def _varint(x: int) -> bytes:
    out = bytearray()
    while x > 0x7F:
        out.append(x & 0x7F | 0x80)
        x >>= 7
    return bytes([*out, x])


def _whole(field: int, x: int) -> bytes:
    return _varint(field << 3) + _varint(x)


def _bytes(field: int, x: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(x)) + x


# --- CRC-32C, masked as TensorFlow's records have it ---


@cache
def _table() -> list[int]:
    table = []
    for x in range(256):
        for _ in range(8):
            x = x >> 1 ^ (0x82F63B78 if x & 1 else 0)
        table.append(x)
    return table


def _checksum(data: bytes) -> bytes:
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
