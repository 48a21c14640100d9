"""A gRPC server on asyncio: HTTP/2 (RFC 9113) with the few parts that gRPC's protocol uses.

``grpc.aio`` takes almost four times the CPU time for a call. This server has no HPACK table, so that it decodes equal
header blocks, such as those of a proxy, only once.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from socket import socket
from struct import Struct
from typing import Any, Self, cast
from urllib.parse import quote

from lengthwise.schema.errors import MissingExtraError

try:
    import hpack
except ImportError as error:
    raise MissingExtraError("the endpoint picker", "envoy") from error

_log = logging.getLogger("lengthwise.gateway.edge")
OK, CANCELLED, NOT_FOUND, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 1, 5, 8, 12, 13  # statuses of gRPC

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _PRIORITY, _RST_STREAM, _SETTINGS, _PUSH_PROMISE, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = (
    range(10)
)  # types of frames
_END_STREAM = _ACK = 0x1
_END_HEADERS, _PADDED, _HAS_PRIORITY = 0x4, 0x8, 0x20
_NO_ERROR, _PROTOCOL_ERROR, _FLOW_CONTROL_ERROR, _FRAME_SIZE_ERROR, _REFUSED_STREAM = 0, 1, 3, 6, 7
_COMPRESSION_ERROR, _ENHANCE_YOUR_CALM = 9, 11
_HEADER_TABLE_SIZE, _MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE, _MAX_HEADER_LIST_SIZE = 1, 3, 4, 6
_FRAME, _MESSAGE, _SETTING, _WORD = Struct(">HBBBI"), Struct(">BI"), Struct(">HI"), Struct(">I")
_MAX_FRAME_BYTES = 1 << 14  # the protocol's default, for both directions
_MAX_HEADER_BYTES, _MAX_CONTINUATIONS = 1 << 16, 16
_MAX_STREAMS = 1 << 16  # requests that wait have a stream each
_MAX_WINDOW = (1 << 31) - 1
_WINDOW = 1 << 18  # bytes of a stream that the client may send before its handler reads them
_DEFAULT_WINDOW = (1 << 16) - 1
_UNREAD_S, _CLOSE_S = 60.0, 1.0  # for which a client may read nothing; to send GOAWAY
_MAX_WINDOW_CHANGES = 100  # of all streams' windows, in a connection; clients that measure theirs need a dozen
_MAX_BLOCKS = 64  # header blocks whose contents are stored
_LENGTH_LIMIT = 127  # HPACK writes a shorter length as one byte
Handler = Callable[["Stream"], Awaitable[None]]


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    size = len(payload)
    return _FRAME.pack(size >> 8, size & 255, kind, flags, stream_id) + payload


def _header(name: bytes, value: bytes) -> bytes:
    """Return a header as HPACK's literal without indexing."""
    value = value[: _LENGTH_LIMIT - 1]
    return b"\0%c%b%c%b" % (len(name), name, len(value), value)


_HEAD = _header(b":status", b"200") + _header(b"content-type", b"application/grpc")
_OK_TRAILERS = _header(b"grpc-status", b"0")


class StatusError(Exception):
    """Ends a call with a status of gRPC other than OK."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _ConnectionError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Stream:
    """A call with its messages in both directions, as bytes."""

    def __init__(self, connection: _Connection, number: int, handler: Handler | None) -> None:
        self.number, self.send_window = number, connection.initial_window
        self.task: asyncio.Task[None] | None = None
        self._connection, self._handler = connection, handler
        self._messages: deque[bytes] = deque()
        self._partial = bytearray()  # of a message whose rest has not arrived
        self._unsent = bytearray()  # beyond the client's windows
        self.unacknowledged_bytes = 0  # received since the last WINDOW_UPDATE
        self._has_ended = self._is_closed = False  # by the client, by the server
        self._is_head_sent = False
        self._trailers = b""
        self._reader: asyncio.Future[None] | None = None
        self._on_message: Callable[[bytes], None] | None = None

    async def read(self) -> bytes | None:
        """Return the next message, or None at the end of the client's messages."""
        if not self._messages and not self._has_ended:
            await self._wait()
        return self._messages.popleft() if self._messages else None

    async def each(self, on_message: Callable[[bytes], None]) -> None:
        """Call a function with each later message as it arrives, until the end of the client's messages."""
        while self._messages:
            on_message(self._messages.popleft())
        if not self._has_ended:
            self._on_message = on_message
            await self._wait()

    async def _wait(self) -> None:
        self._reader = asyncio.get_running_loop().create_future()
        self._acknowledge()
        try:
            await self._reader
        finally:
            self._reader = self._on_message = None

    def write(self, message: bytes) -> None:
        """Send a message, and store the part that exceeds the client's windows."""
        data = _MESSAGE.pack(0, len(message)) + message
        connection, size = self._connection, len(data)
        if self._is_closed:
            return
        if not self._is_head_sent:
            self._is_head_sent = True
            connection.send(_frame(_HEADERS, _END_HEADERS, self.number, _HEAD))
        is_admitted = size <= self.send_window and size <= connection.send_window and size <= _MAX_FRAME_BYTES
        if is_admitted and connection.can_write and not self._unsent:
            self.send_window -= size
            connection.send_window -= size
            connection.send(_frame(_DATA, 0, self.number, data))
        else:
            self._unsent += data
            self.send_unsent()

    def send_unsent(self) -> None:
        """Send the stored data that the windows admit now."""
        connection = self._connection
        while self._unsent and connection.can_write:
            size = min(len(self._unsent), self.send_window, connection.send_window, _MAX_FRAME_BYTES)
            if size <= 0:
                break
            self.send_window -= size
            connection.send_window -= size
            connection.send(_frame(_DATA, 0, self.number, bytes(self._unsent[:size])))
            del self._unsent[:size]
        if self._unsent and self.send_window > 0:
            connection.blocked[self.number] = self
            return
        connection.blocked.pop(self.number, None)
        if self._unsent:
            return
        if self._reader is not None:
            self._acknowledge()
        if self._trailers:
            self._send_trailers()

    def finish(self, status: int = OK, message: str = "") -> None:
        """End the call. Later messages of either side are dropped."""
        trailers = _OK_TRAILERS if status == OK else _header(b"grpc-status", b"%d" % status)
        if message:
            trailers += _header(b"grpc-message", quote(message, safe=" '()=,/;:").encode())
        self._trailers = trailers if self._is_head_sent else _HEAD + trailers
        if not self._unsent:
            self._send_trailers()

    def _send_trailers(self) -> None:
        connection = self._connection
        if not self._is_closed:
            self._is_closed = True
            connection.send(_frame(_HEADERS, _END_HEADERS | _END_STREAM, self.number, self._trailers))
            if not self._has_ended:  # a client that still sends may stop
                connection.send(_frame(_RST_STREAM, 0, self.number, _WORD.pack(_NO_ERROR)))
            connection.remove(self)

    # Called by the connection:

    def receive(self, data: bytes) -> None:
        """Read the data of a frame."""
        if self.unacknowledged_bytes > _WINDOW:
            raise _ConnectionError(_FLOW_CONTROL_ERROR, "a stream exceeds its window")
        size = len(data) - _MESSAGE.size
        if size >= 0 and not self._partial and data[: _MESSAGE.size] == _MESSAGE.pack(0, size):
            self._on_complete(data[_MESSAGE.size :])  # a complete message, as most are
        else:
            self._receive_parts(data)
        if self._reader is not None or self.task is None:
            self._acknowledge()

    def _receive_parts(self, data: bytes) -> None:
        self._partial += data
        while len(self._partial) >= _MESSAGE.size and not self._is_closed:
            is_compressed, size = _MESSAGE.unpack_from(self._partial)
            if is_compressed:
                self.abort(UNIMPLEMENTED, "messages must not be compressed")
                return
            if size > self._connection.max_message_bytes:
                limit = self._connection.max_message_bytes
                self.abort(RESOURCE_EXHAUSTED, f"a message must have at most {limit} bytes; it has {size}")
                return
            end = size + _MESSAGE.size
            if len(self._partial) < end:
                break
            message = bytes(self._partial[_MESSAGE.size : end])
            del self._partial[:end]
            self._on_complete(message)

    def _on_complete(self, message: bytes) -> None:
        if self._on_message is not None:
            try:
                self._on_message(message)
            except Exception as error:  # noqa: BLE001 - raised in the call's own task
                self._on_message = None
                self._wake(error)
        else:
            self._messages.append(message)
            self._wake()
        if self.task is None and self._handler is not None:
            self.task = asyncio.get_running_loop().create_task(self._run(self._handler))
            self.task.add_done_callback(self._connection.tasks.discard)
            self._connection.tasks.add(self.task)

    def end(self) -> None:
        """Read the end of the client's messages."""
        self._has_ended = True
        if self._partial:
            self.abort(INTERNAL, "the last message is incomplete")
        elif self.task is None:
            self.abort(INTERNAL, "there is no message")
        else:
            self._wake()

    def abort(self, status: int | None = None, message: str = "") -> None:
        """Cancel the call's task, and end the call with a status if one is given."""
        if status is None:
            self._is_closed = True
        else:
            self._unsent.clear()
            self.finish(status, message)
        if self.task is not None:
            self.task.cancel()

    async def _run(self, handler: Handler) -> None:
        try:
            await handler(self)
        except StatusError as error:
            self.finish(error.status, str(error))
        except asyncio.CancelledError:
            self.finish(CANCELLED, "the call was cancelled")
            raise
        except Exception:  # noqa: BLE001 - other calls go on
            _log.exception("a call of the picker failed")
            self.finish(INTERNAL, "the picker failed")
        else:
            self.finish()

    def _wake(self, error: Exception | None = None) -> None:
        if self._reader is not None and not self._reader.done():
            if error is None:
                self._reader.set_result(None)
            else:
                self._reader.set_exception(error)

    def _acknowledge(self) -> None:
        """Let the client send more, unless it leaves answers unread."""
        if self.unacknowledged_bytes > _WINDOW // 2 and not self._unsent and not self._has_ended:
            self._connection.send(_frame(_WINDOW_UPDATE, 0, self.number, _WORD.pack(self.unacknowledged_bytes)))
            self.unacknowledged_bytes = 0


class _Connection(asyncio.Protocol):
    """A connection of HTTP/2 with its streams."""

    def __init__(self, server: GrpcServer) -> None:
        self.max_message_bytes, self.tasks = server.max_message_bytes, server.tasks
        self.initial_window = self.send_window = _DEFAULT_WINDOW
        self.can_write = True
        self.streams: dict[int, Stream] = {}
        self.blocked: dict[int, Stream] = {}  # streams with data that their own windows admit
        self._server, self._transport = server, cast("asyncio.Transport", None)
        self._data, self._last_stream, self._received_bytes, self._window_changes = b"", 0, 0, 0
        self._has_preface = self._is_going_away = False
        self._hpack = hpack.Decoder(max_header_list_size=_MAX_HEADER_BYTES)
        self._handlers: dict[bytes, Handler | None] = {}  # by header block
        self._unread = cast("asyncio.TimerHandle", None)
        self._block: list[bytes] = []  # of headers that CONTINUATION continues
        self._block_stream, self._block_flags = 0, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._server.connections.add(self)
        settings = {
            _HEADER_TABLE_SIZE: 0, _MAX_CONCURRENT_STREAMS: _MAX_STREAMS, _INITIAL_WINDOW_SIZE: _WINDOW,
            _MAX_HEADER_LIST_SIZE: _MAX_HEADER_BYTES,
        }  # fmt: skip
        self.send(_frame(_SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in settings.items())))
        self.send(_frame(_WINDOW_UPDATE, 0, 0, _WORD.pack(_MAX_WINDOW - _DEFAULT_WINDOW)))

    def connection_lost(self, _: Exception | None) -> None:
        self._server.connections.discard(self)
        for stream in list(self.streams.values()):
            stream.abort()
        self.streams.clear()
        self.blocked.clear()

    def pause_writing(self) -> None:
        self.can_write = False
        self._transport.pause_reading()  # or answers pile up for a client that reads nothing
        self._unread = asyncio.get_running_loop().call_later(_UNREAD_S, self.abort)

    def resume_writing(self) -> None:
        self.can_write = True
        self._unread.cancel()
        self._transport.resume_reading()
        self._unblock()

    def send(self, data: bytes) -> None:
        """Send frames."""
        self._transport.write(data)

    def remove(self, stream: Stream) -> None:
        """Remove a stream that is closed by the server, or by both sides."""
        self.streams.pop(stream.number, None)
        self.blocked.pop(stream.number, None)
        if self._is_going_away and not self.streams:
            self._transport.close()

    def go_away(self) -> None:
        """Accept no further streams, and close the connection after the last one."""
        self._is_going_away = True
        self.send(_frame(_GOAWAY, 0, 0, _WORD.pack(self._last_stream) + _WORD.pack(_NO_ERROR)))
        if not self.streams:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._data:
            data = self._data + data
        try:
            self._data = data[self._read_frames(data) :]
        except _ConnectionError as error:
            _log.warning("the picker closes a connection: %s", error)
            self.send(_frame(_GOAWAY, 0, 0, _WORD.pack(self._last_stream) + _WORD.pack(error.code)))
            self._data = b""
            self._transport.close()
            asyncio.get_running_loop().call_later(_CLOSE_S, self.abort)  # even if the client reads nothing

    def _read_frames(self, data: bytes) -> int:
        """Read complete frames. Return the number of bytes read."""
        at, size = 0, len(data)
        if not self._has_preface:
            if not _PREFACE.startswith(data[: len(_PREFACE)]):
                raise _ConnectionError(_PROTOCOL_ERROR, "a connection must begin with the preface of HTTP/2")
            if size < len(_PREFACE):
                return 0
            self._has_preface, at = True, len(_PREFACE)
        while size - at >= _FRAME.size and not self._transport.is_closing():
            high, low, kind, flags, number = _FRAME.unpack_from(data, at)
            length = high << 8 | low
            if length > _MAX_FRAME_BYTES:
                raise _ConnectionError(_FRAME_SIZE_ERROR, f"a frame must not have {length} bytes")
            end = at + _FRAME.size + length
            if size < end:
                break
            payload, at = data[at + _FRAME.size : end], end
            number &= _MAX_WINDOW
            if self._block_stream and kind != _CONTINUATION:
                raise _ConnectionError(_PROTOCOL_ERROR, "only CONTINUATION may follow incomplete headers")
            if kind == _DATA:
                self._on_data(number, flags, payload)
            elif kind == _HEADERS:
                self._on_headers(number, flags, payload)
            else:
                self._on_other(kind, number, flags, payload)
        return at

    def _on_data(self, number: int, flags: int, payload: bytes) -> None:
        self._received_bytes += len(payload)
        if self._received_bytes > _MAX_WINDOW // 2:
            self.send(_frame(_WINDOW_UPDATE, 0, 0, _WORD.pack(self._received_bytes)))
            self._received_bytes = 0
        if (stream := self.streams.get(number)) is None:
            if not 0 < number <= self._last_stream:
                raise _ConnectionError(_PROTOCOL_ERROR, "data of a stream that is not open")
            return  # the server has closed it
        stream.unacknowledged_bytes += len(payload)
        if flags & _PADDED:
            payload = _without_padding(payload)
        if payload:
            stream.receive(payload)
        if flags & _END_STREAM:
            stream.end()

    def _on_headers(self, number: int, flags: int, payload: bytes) -> None:
        if not number & 1:
            raise _ConnectionError(_PROTOCOL_ERROR, "headers of a stream that a client cannot open")
        if flags & _PADDED:
            payload = _without_padding(payload)
        if flags & _HAS_PRIORITY:
            payload = payload[5:]
        if flags & _END_HEADERS:
            self._on_block(number, flags, payload)
        else:
            self._block, self._block_stream, self._block_flags = [payload], number, flags

    def _on_block(self, number: int, flags: int, block: bytes) -> None:
        handler = self._handlers.get(block)
        if handler is None or self._hpack.header_table_size:
            handler = self._decode(block)
        if (stream := self.streams.get(number)) is not None:  # trailers
            if not flags & _END_STREAM:
                raise _ConnectionError(_PROTOCOL_ERROR, "trailers must end their stream")
            stream.end()
            return
        if number <= self._last_stream:
            return  # trailers of a stream that the server has closed
        self._last_stream = number
        if self._is_going_away or len(self.streams) >= _MAX_STREAMS:
            self.send(_frame(_RST_STREAM, 0, number, _WORD.pack(_REFUSED_STREAM)))
            return
        stream = self.streams[number] = Stream(self, number, handler)
        if handler is None:
            stream.abort(UNIMPLEMENTED, "there is no such method, or its messages are compressed")
        elif flags & _END_STREAM:
            stream.end()

    def _decode(self, block: bytes) -> Handler | None:
        """Return the handler of the method that a block names, or None."""
        try:
            headers = dict(self._hpack.decode(block, raw=True))
        except hpack.HPACKError as error:
            raise _ConnectionError(_COMPRESSION_ERROR, f"headers cannot be decoded: {error}") from None
        handler = self._server.handlers.get(headers.get(b":path", b""))
        if not headers.get(b"content-type", b"").startswith(b"application/grpc"):
            handler = None
        if handler is not None and not self._hpack.header_table_size and len(self._handlers) < _MAX_BLOCKS:
            self._handlers[block] = handler  # without a table, equal blocks have equal contents
        return handler

    def _on_other(self, kind: int, number: int, flags: int, payload: bytes) -> None:  # noqa: C901 - a case a line
        if kind == _CONTINUATION:
            if not self._block_stream or number != self._block_stream:
                raise _ConnectionError(_PROTOCOL_ERROR, "CONTINUATION without headers")
            self._block.append(payload)
            if len(self._block) > _MAX_CONTINUATIONS or sum(map(len, self._block)) > _MAX_HEADER_BYTES:
                raise _ConnectionError(_ENHANCE_YOUR_CALM, "headers are too long")
            if flags & _END_HEADERS:
                self._block_stream = 0
                self._on_block(number, self._block_flags, b"".join(self._block))
        elif kind == _WINDOW_UPDATE:
            self._on_window_update(number, payload)
        elif kind == _RST_STREAM:
            self._on_reset(number)
        elif kind == _SETTINGS:
            self._on_settings(flags, payload)
        elif kind == _PING:
            if len(payload) != 8 or number:
                raise _ConnectionError(_FRAME_SIZE_ERROR, "a PING has 8 bytes")
            if not flags & _ACK:
                self.send(_frame(_PING, _ACK, 0, payload))
        elif kind == _PUSH_PROMISE:
            raise _ConnectionError(_PROTOCOL_ERROR, "PUSH_PROMISE must not come from a client")
        # GOAWAY needs nothing: streams that are open go on. PRIORITY and unknown frames have no effect.

    def _on_reset(self, number: int) -> None:
        if not 0 < number <= self._last_stream:
            raise _ConnectionError(_PROTOCOL_ERROR, "a reset of a stream that is not open")
        if (stream := self.streams.get(number)) is not None:
            stream.abort()
            self.remove(stream)

    def _on_window_update(self, number: int, payload: bytes) -> None:
        if len(payload) != _WORD.size:
            raise _ConnectionError(_FRAME_SIZE_ERROR, "a WINDOW_UPDATE has 4 bytes")
        more = _WORD.unpack(payload)[0] & _MAX_WINDOW
        if not number:
            self.send_window += more
            if not more or self.send_window > _MAX_WINDOW:
                raise _ConnectionError(_FLOW_CONTROL_ERROR, "the connection's window is out of range")
            self._unblock()
        elif (stream := self.streams.get(number)) is not None:
            stream.send_window += more
            if not more or stream.send_window > _MAX_WINDOW:
                raise _ConnectionError(_FLOW_CONTROL_ERROR, "a stream's window is out of range")
            stream.send_unsent()

    def _on_settings(self, flags: int, payload: bytes) -> None:
        if flags & _ACK:
            self._hpack.max_allowed_table_size = 0  # from here on, the client's blocks use no table
            return
        if len(payload) % _SETTING.size:
            raise _ConnectionError(_FRAME_SIZE_ERROR, "settings have 6 bytes each")
        window = self.initial_window
        for name, value in _SETTING.iter_unpack(payload):
            if name == _INITIAL_WINDOW_SIZE:
                if value > _MAX_WINDOW:
                    raise _ConnectionError(_FLOW_CONTROL_ERROR, "the initial window is out of range")
                window = value
        self.send(_frame(_SETTINGS, _ACK, 0, b""))
        if (more := window - self.initial_window) != 0:  # once a frame, as all streams are visited
            self._window_changes += 1
            if self._window_changes > _MAX_WINDOW_CHANGES:
                raise _ConnectionError(_ENHANCE_YOUR_CALM, "the initial window changes too often")
            self.initial_window = window
            for stream in list(self.streams.values()):
                stream.send_window += more
                stream.send_unsent()

    def _unblock(self) -> None:
        while self.blocked and self.send_window > 0 and self.can_write:
            next(iter(self.blocked.values())).send_unsent()


def _without_padding(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise _ConnectionError(_PROTOCOL_ERROR, "the padding is longer than its frame")
    return payload[1 : len(payload) - payload[0]]


class GrpcServer:
    """A gRPC server for methods by path ("/package.Service/Method"), as an async context manager.

    It listens on a bound socket, with TLS if a context is given. Each handler runs as a task from the first message of
    its call on; the server cancels it if the client resets the call or disconnects.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        listener: socket,
        *,
        max_message_bytes: int,
        tls: ssl.SSLContext | None = None,
        stop_s: float = 1.0,
    ) -> None:
        self.handlers = {path.encode(): handler for path, handler in handlers.items()}
        self.max_message_bytes = max_message_bytes
        self.connections: set[_Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self._listener, self._tls, self._stop_s = listener, tls, stop_s
        self._server: Any = None

    async def __aenter__(self) -> Self:
        if self._tls is not None:
            self._tls.set_alpn_protocols(["h2"])
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), sock=self._listener, ssl=self._tls)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Accept no further calls. Calls in progress have ``stop_s`` seconds to end."""
        self._server.close()
        for connection in list(self.connections):
            connection.go_away()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=self._stop_s)
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for connection in list(self.connections):
            connection.abort()
