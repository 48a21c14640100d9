"""The picker's gRPC server, against gRPC's own client and against clients that break HTTP/2."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.gateway.config import bind_socket
from lengthwise.gateway.envoy import grpc_server
from lengthwise.gateway.envoy.grpc_server import NOT_FOUND, GrpcServer, StatusError, Stream

MAX_BYTES = 4 << 20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_HEADERS, PADDED = 4, 8
PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 1, 3, 6, 9, 11
CALL = b"\x83\x86" + b"".join(
    b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
    for name, value in ((b":path", b"/t/Echo"), (b"content-type", b"application/grpc"))
)  # header block: POST, http, path, media type


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def message(data: bytes, flag: int = 0) -> bytes:
    return bytes([flag]) + struct.pack(">I", len(data)) + data


SETTING_UP = PREFACE + frame(SETTINGS)
CALLED = SETTING_UP + frame(HEADERS, END_HEADERS, 1, CALL)


class Calls:
    """Handlers: an echo, one that waits for ever, one that fails, one with a status."""

    def __init__(self) -> None:
        self.waiting = 0

    async def echo(self, stream: Stream) -> None:
        first = await stream.read()
        assert first is not None
        stream.write(first)
        await stream.each(stream.write)

    async def wait(self, _: Stream) -> None:
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting -= 1

    async def fail(self, stream: Stream) -> None:
        await stream.read()
        await stream.each(lambda _: 1 / 0)

    async def status(self, _: Stream) -> None:
        raise StatusError(NOT_FOUND, "no 100 % ä")


@asynccontextmanager
async def served(stop_s: float = 0.01) -> AsyncIterator[tuple[Calls, str, int]]:
    calls, listener = Calls(), bind_socket("127.0.0.1", 0, "port")
    port = listener.getsockname()[1]
    names = {"Echo": calls.echo, "Wait": calls.wait, "Fail": calls.fail, "Status": calls.status}
    methods = {f"/t/{name}": handler for name, handler in names.items()}
    async with GrpcServer(methods, listener, max_message_bytes=MAX_BYTES, stop_s=stop_s):
        yield calls, f"127.0.0.1:{port}", port


def test_calls_of_grpcs_own_client(caplog):
    """Messages of all sizes pass unchanged, also above the windows; each failure has its status."""

    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

    async def main() -> None:
        async with asyncio.timeout(60):
            async with served() as (calls, address, _), grpc.aio.insecure_channel(address, options=options) as channel:

                async def echoed(*sizes: int) -> list[int]:
                    sent = [bytes([size % 251]) * size for size in sizes]
                    call = channel.stream_stream("/t/Echo")(iter(sent))
                    return [len(one) for one in sent if one == await call.read()]

                def call(method: str, *sent: bytes, **named) -> tuple[str, str]:
                    # grpc.aio may hide the status of a call that ends before its messages are sent.
                    with grpc.insecure_channel(address, options=options) as other:
                        try:
                            list(other.stream_stream(f"/t/{method}")(iter(sent), **named))
                        except grpc.RpcError as error:
                            return error.code().name, error.details()
                    return "OK", ""

                async def code(method: str, *sent: bytes, **named) -> tuple[str, str]:
                    return await asyncio.to_thread(call, method, *sent, **named)

                sizes = [0, 1, 16_379, 16_380, 65_535, 300_000, MAX_BYTES]
                assert await echoed(*sizes) == sizes
                assert await asyncio.gather(*(echoed(one, 7) for one in range(200))) == [[n, 7] for n in range(200)]
                assert await code("Status", b"") == ("NOT_FOUND", "no 100 % ä")
                assert (await code("Other", b""))[0] == "UNIMPLEMENTED"
                assert (await code("Echo", bytes(100), compression=grpc.Compression.Gzip))[0] == "UNIMPLEMENTED"
                assert (await code("Echo", bytes(MAX_BYTES + 1)))[0] == "RESOURCE_EXHAUSTED"
                assert (await code("Fail", b"", b""))[0] == "INTERNAL"
                assert [one.exc_info[0] for one in caplog.records] == [ZeroDivisionError]
                gone, stopped = (channel.stream_stream("/t/Wait")(iter([b""])) for _ in range(2))
                tasks = [asyncio.ensure_future(one.read()) for one in (gone, stopped)]
                while calls.waiting < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                gone.cancel()
                while calls.waiting == 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            assert calls.waiting == 0
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(one) for one in results} <= {asyncio.CancelledError, grpc.aio.AioRpcError}

    asyncio.run(main())


async def frames_of(port: int, sent: bytes, *, until: int = GOAWAY) -> list[tuple[int, int, bytes]]:
    """Send bytes; return type, stream and payload of frames up to one of a type, or to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    found: list[tuple[int, int, bytes]] = []
    try:
        while not found or found[-1][0] != until:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            found.append((head[3], int.from_bytes(head[5:], "big"), payload))
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()
    return found


BROKEN = {
    "no HTTP/2": (b"GET / HTTP/1.1\r\n\r\n", PROTOCOL_ERROR),
    "a long frame": (SETTING_UP + frame(DATA, 0, 1, bytes(16_385)), FRAME_SIZE_ERROR),
    "data of no stream": (SETTING_UP + frame(DATA, 0, 1, b"x"), PROTOCOL_ERROR),
    "a stream of servers": (SETTING_UP + frame(HEADERS, END_HEADERS, 2, CALL), PROTOCOL_ERROR),
    "a promise": (SETTING_UP + frame(PUSH_PROMISE, 0, 1), PROTOCOL_ERROR),
    "a reset of no stream": (SETTING_UP + frame(RST_STREAM, 0, 1, bytes(4)), PROTOCOL_ERROR),
    "a short ping": (SETTING_UP + frame(PING, 0, 0, b"x"), FRAME_SIZE_ERROR),
    "a wrong setting": (SETTING_UP + frame(SETTINGS, 0, 0, b"x"), FRAME_SIZE_ERROR),
    "a window too large": (CALLED + frame(WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff"), FLOW_CONTROL_ERROR),
    "an update by nothing": (CALLED + frame(WINDOW_UPDATE, 0, 0, bytes(4)), FLOW_CONTROL_ERROR),
    "damaged headers": (SETTING_UP + frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"), COMPRESSION_ERROR),
    "headers that grow": (SETTING_UP + frame(HEADERS, 0, 1, CALL) + 99 * frame(CONTINUATION, 0, 1), ENHANCE_YOUR_CALM),
    "interrupted headers": (SETTING_UP + frame(HEADERS, 0, 1, CALL) + frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
    "wrong padding": (CALLED + frame(DATA, PADDED, 1, b"\x05abc"), PROTOCOL_ERROR),
    "windows that change": (
        CALLED + b"".join(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, size)) for size in range(101)),
        ENHANCE_YOUR_CALM,
    ),
    "more than a window": (CALLED + 17 * frame(DATA, 0, 1, message(bytes(16_379))), FLOW_CONTROL_ERROR),
}


@pytest.mark.slow
def test_connections_that_break_the_protocol(monkeypatch):
    """Each is closed with its error code, and other connections go on."""

    async def main() -> None:
        async with asyncio.timeout(60), served() as (_, address, port):
            for name, (sent, code) in BROKEN.items():
                kind, _, payload = (await frames_of(port, sent))[-1]
                assert (kind, int.from_bytes(payload[4:], "big")) == (GOAWAY, code), name
            monkeypatch.setattr(grpc_server, "_UNREAD_S", 1.0)
            with socket.socket() as unread:  # it calls and reads nothing
                unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                unread.connect(("127.0.0.1", port))
                unread.setblocking(False)

                async def send_calls() -> None:
                    await asyncio.get_running_loop().sock_sendall(unread, SETTING_UP)
                    for first in range(1, 1 << 30, 2000):
                        calls = (frame(HEADERS, END_HEADERS + 1, one, CALL) for one in range(first, first + 2000, 2))
                        await asyncio.get_running_loop().sock_sendall(unread, b"".join(calls))

                with pytest.raises(ConnectionError):
                    await send_calls()
            # Headers in three parts with padding, a message in parts, and an answer that waits for the window.
            window = struct.pack(">HI", 4, 10)
            parts = frame(HEADERS, PADDED, 1, b"\x02" + CALL[:3] + b"\0\0")
            parts += frame(CONTINUATION, 0, 1, CALL[3:9]) + frame(CONTINUATION, END_HEADERS, 1, CALL[9:])
            body = message(b"0123456789")
            parts += frame(DATA, PADDED, 1, b"\x03" + body[:2] + b"\0\0\0") + frame(DATA, 1, 1, body[2:])
            sent = PREFACE + frame(SETTINGS, 0, 0, window) + parts + frame(99, 0, 1, b"unknown")
            found = await frames_of(port, sent + frame(PING, 0, 0, b"12345678"), until=PING)
            assert not [one for one in found if one[0] == RST_STREAM]
            found = await frames_of(port, sent + frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 5)), until=DATA)
            data = [payload for kind, _, payload in found if kind == DATA]
            assert data[0] == body[: len(data[0])]
            async with grpc.aio.insecure_channel(address) as channel:
                call = channel.stream_stream("/t/Echo")(iter([b"still here"]))
                assert await call.read() == b"still here"

    asyncio.run(main())


kinds, numbers = st.integers(0, 12), st.integers(0, 5)
payloads = st.one_of(st.binary(max_size=40), st.just(CALL), st.builds(message, st.binary(max_size=20)))
some_frames = st.lists(st.builds(frame, kinds, st.integers(0, 255), numbers, payloads), max_size=20)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(some_frames, min_size=1, max_size=5))
def test_no_frames_raise(connections):
    """Any frames end in answers or a closed connection, never in an exception."""

    async def main() -> list[str]:
        async with asyncio.timeout(60), served() as (_, _, port):
            loop, raised = asyncio.get_running_loop(), list[str]()
            loop.set_exception_handler(lambda _, context: raised.append(str(context)))
            for frames in connections:
                await frames_of(port, SETTING_UP + b"".join(frames) + frame(PUSH_PROMISE, 0, 1))
            return raised

    logging.disable()
    try:
        assert asyncio.run(main()) == []
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_frames_in_any_pieces(chunk):
    """Frames that arrive in pieces give the same answers."""

    async def main() -> bytes:
        async with asyncio.timeout(60), served() as (_, _, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            sent = CALLED + b"".join(frame(DATA, 0, 1, message(b"m%d" % number)) for number in range(5))
            sent += frame(DATA, 1, 1)
            for at in range(0, len(sent), chunk):
                writer.write(sent[at : at + chunk])
                await writer.drain()
                await asyncio.sleep(0)
            out = b""
            while b"grpc-status" not in out:
                out += await reader.read(1000)
            writer.close()
            return out

    out = asyncio.run(main())
    assert [out.count(message(b"m%d" % number)) for number in range(5)] == [1] * 5
