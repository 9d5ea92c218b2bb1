"""How the trainer and the processes of reward functions talk: pickles behind their length."""

import pickle
import socket
import struct
from typing import Any

LENGTH = struct.Struct("!Q")
# Before a request, which is two pickles (the function's name; lists, other arguments, samples): its
# length, its number, the number of the function, one sample after another or all at once.
REQUEST = struct.Struct("!QQI?")
# Of one request or answer; more is a mistake (a column of images, say), and copied several times.
LARGEST = 1 << 30

# Kinds of answers: the request is read; the values; the function raised; what a user must mend.
BEGUN, VALUES, RAISED, WRONG = range(4)


def pack(value: Any) -> bytes:
    """A pickle with its length."""
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


def read_exactly(connection: socket.socket, size: int) -> bytearray | None:
    """Blocks for `size` bytes; None if the other side closed before."""
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = connection.recv_into(view[got:])
        if not count:
            return None
        got += count
    return data


def read_value(connection: socket.socket) -> Any:
    """What the other side packed. Raises EOFError if it closed."""
    header = read_exactly(connection, LENGTH.size)
    data = None if header is None else read_exactly(connection, *LENGTH.unpack(header))
    if data is None:
        raise EOFError
    return pickle.loads(data)
