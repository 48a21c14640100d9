"""The store of a shared queue: a PostgreSQL database that has the lease of the leader and carries the messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from typing import Any, Self

import msgspec

from lengthwise.gateway.config import SharedQueueConfig
from lengthwise.gateway.protocols import Clock
from lengthwise.gateway.shared_queue.scheduler import HEARTBEATS_PER_LEASE, SharedScheduler
from lengthwise.schema.errors import InputError, MissingExtraError

_log = logging.getLogger("lengthwise.gateway.shared_queue")
_FORMAT = 1  # of messages; gateways with different formats share no queue
_TIMEOUT_S = 5.0
_PROGRESS_S = 0.05  # longest time for which a gateway delays the progress of its requests
_RECONNECT_S = 0.5
_TABLES = (
    "SELECT pg_advisory_xact_lock(1819767921)",  # CREATE TABLE IF NOT EXISTS fails if two gateways run it at once
    """CREATE UNLOGGED TABLE IF NOT EXISTS lengthwise_queues (
        queue TEXT PRIMARY KEY, leader TEXT NOT NULL, epoch BIGINT NOT NULL, until TIMESTAMPTZ NOT NULL,
        secret TEXT NOT NULL)""",
    """CREATE UNLOGGED TABLE IF NOT EXISTS lengthwise_gateways (
        queue TEXT NOT NULL, gateway TEXT NOT NULL, until TIMESTAMPTZ NOT NULL, PRIMARY KEY (queue, gateway))""",
)
_KEY_OF_HASHES = """
INSERT INTO lengthwise_queues VALUES (%(queue)s, '', 0, '-infinity', %(secret)s)
ON CONFLICT (queue) DO UPDATE SET secret = lengthwise_queues.secret RETURNING secret"""
_ALIVE = """
INSERT INTO lengthwise_gateways VALUES (%(queue)s, %(gateway)s, clock_timestamp() + %(lease)s::INTERVAL)
ON CONFLICT (queue, gateway) DO UPDATE SET until = excluded.until"""
# The epoch is at least the time in milliseconds, so that it also grows if a crash has lost the last one.
_LEASE = """
UPDATE lengthwise_queues
SET leader = %(gateway)s, until = clock_timestamp() + %(lease)s::INTERVAL,
    epoch = CASE WHEN leader = %(gateway)s AND until > clock_timestamp() THEN epoch
            ELSE GREATEST(epoch + 1, (extract(epoch FROM clock_timestamp()) * 1000)::BIGINT) END
WHERE queue = %(queue)s AND (leader = %(gateway)s OR until <= clock_timestamp())"""
_GONE = "DELETE FROM lengthwise_gateways WHERE queue = %(queue)s AND until <= clock_timestamp()"
_STATE = """
SELECT leader, epoch, ARRAY(SELECT gateway FROM lengthwise_gateways WHERE queue = %(queue)s)
FROM lengthwise_queues WHERE queue = %(queue)s"""
_LEAVE = (
    "DELETE FROM lengthwise_gateways WHERE queue = %(queue)s AND gateway = %(gateway)s",
    "UPDATE lengthwise_queues SET until = '-infinity' WHERE queue = %(queue)s AND leader = %(gateway)s",
)
_NOTIFY = "SELECT pg_notify(place, message) FROM unnest(%s::TEXT[], %s::TEXT[]) AS sent (place, message)"


class SharedQueue:
    """Connects a gateway's scheduler with the other gateways: an async context manager.

    Each gateway listens on a channel of its own. The lease of the leader is a row whose times are those of the
    database's clock. After a connection breaks, the gateway's queue is local until it has connected again. ``wake``
    lets the driver carry out decisions. All gateways have the key ``secret`` for hashes. Raises InputError if the
    database cannot be used at the start.
    """

    def __init__(
        self, config: SharedQueueConfig, scheduler: SharedScheduler, clock: Clock, wake: Callable[[], None]
    ) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise MissingExtraError("a shared queue in PostgreSQL", "postgres") from error
        self._driver: Any = psycopg
        assert config.url is not None, "a shared queue has a store"
        self._url, self._scheduler, self._clock, self._wake = config.url, scheduler, clock, wake
        queue, gateway = f"{config.name}/{_FORMAT}", scheduler.gateway
        self._row = {"queue": queue, "gateway": gateway, "lease": f"{config.lease_s} seconds"}
        self._heartbeat_s = config.lease_s / HEARTBEATS_PER_LEASE
        self.secret, self._sends = "", asyncio.Event()
        self._connections: tuple[Any, ...] = ()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(2 * _TIMEOUT_S):
                self._connections = await self._connect()
        except (self._driver.Error, OSError, TimeoutError) as error:
            reason = " ".join(str(error).split()) or "no answer"
            raise InputError(
                f"shared_queue.url must be a PostgreSQL database that answers when the gateway starts: {reason}"
            ) from error
        self._scheduler.on_outgoing = self._sends.set
        await self._heartbeat(self._connections[1])  # so that the first gateway leads before it has requests
        self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None, "the block has begun"
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(self._driver.Error, TimeoutError):
            async with asyncio.timeout(1.0):
                if self._connections:
                    self._scheduler.announce_stop(self._clock())
                    await self._send(self._connections[1])
                    await self._transaction(self._connections[1], *_LEAVE)
        await self._close()

    async def _connect(self) -> tuple[Any, Any]:
        """Create the tables if they are missing. Return a connection that listens and one that sends."""
        options = f"-c statement_timeout={int(1000 * _TIMEOUT_S)} -c synchronous_commit=off"
        made = []
        try:
            for _ in range(2):
                connect = self._driver.AsyncConnection.connect
                made.append(await connect(self._url, autocommit=True, connect_timeout=int(_TIMEOUT_S), options=options))
            listens, sends = made
            await self._transaction(sends, *_TABLES)
            found = await sends.execute(_KEY_OF_HASHES, self._row | {"secret": secrets.token_hex(32)})
            (self.secret,) = await found.fetchone()
            await listens.execute(f'LISTEN "{_channel(self._scheduler.gateway)}"')
        except BaseException:
            for one in made:
                await one.close()
            raise
        return listens, sends

    async def _transaction(self, connection: Any, *statements: str) -> list[Any]:
        """Run statements in one transaction. Return the rows of the last one, or []."""
        async with connection.transaction():
            for statement in statements:
                cursor = await connection.execute(statement, self._row)
            return list(await cursor.fetchall()) if cursor.description else []

    async def _heartbeat(self, connection: Any) -> None:
        sent_s = self._clock()
        ((leader, epoch, gateways),) = await self._transaction(connection, _ALIVE, _GONE, _LEASE, _STATE)
        self._scheduler.heartbeat(self._clock(), sent_s, leader, epoch, gateways)
        self._wake()

    async def _run(self) -> None:
        while True:
            try:
                if not self._connections:
                    async with asyncio.timeout(2 * _TIMEOUT_S):
                        self._connections = await self._connect()
                listens, sends = self._connections
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._receive_messages(listens))
                    tasks.create_task(self._send_messages(sends))
            except (ExceptionGroup, self._driver.Error, OSError, TimeoutError) as error:
                cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
                if self._connections:
                    _log.warning("the store of the shared queue is lost: %s", " ".join(str(cause).split()))
                await self._close()
                self._scheduler.leave(self._clock(), "the store is lost")
                self._wake()
                await asyncio.sleep(_RECONNECT_S)

    async def _receive_messages(self, connection: Any) -> None:
        async for notice in connection.notifies():
            try:
                self._scheduler.receive(self._clock(), notice.payload.encode())
            except msgspec.MsgspecError as error:
                _log.warning("a message of the shared queue cannot be read: %s", error)
            self._wake()
        raise ConnectionError("the connection was closed")

    async def _send_messages(self, connection: Any) -> None:
        heartbeat_s = self._clock()
        while True:
            if (now_s := self._clock()) >= heartbeat_s:
                heartbeat_s = now_s + self._heartbeat_s
                async with asyncio.timeout(_TIMEOUT_S):
                    await self._heartbeat(connection)
            await self._send(connection)
            self._sends.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_PROGRESS_S, max(0.0, heartbeat_s - self._clock()))):
                    await self._sends.wait()

    async def _send(self, connection: Any) -> None:
        while outgoing := self._scheduler.outgoing():
            places = [_channel(gateway) for gateway, _ in outgoing]
            await connection.execute(_NOTIFY, (places, [message.decode() for _, message in outgoing]))

    async def _close(self) -> None:
        connections, self._connections = self._connections, ()
        for one in connections:
            with contextlib.suppress(self._driver.Error):
                await one.close()


def _channel(gateway: str) -> str:
    return f"lengthwise_{gateway}"
