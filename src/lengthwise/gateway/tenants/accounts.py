"""Accounts of tenants: their keys, reservations of requests in flight, and their usage, exact to the token."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from lengthwise.gateway.background import background
from lengthwise.gateway.config import Key, TenantsConfig
from lengthwise.gateway.edge.errors import Fault
from lengthwise.gateway.protocols import Clock, Listener
from lengthwise.gateway.request import Outcome, Request
from lengthwise.gateway.tenants.progress import ProgressFile, abandoned
from lengthwise.gateway.tenants.records import (
    COST_UNIT,
    PERIODS,
    UNITS,
    KeySettings,
    ManagedKey,
    Quota,
    TenantSettings,
    check_prices,
    cost,
    quotas,
    window,
)
from lengthwise.gateway.tenants.store import INTERRUPT_S, POSTGRES, Store, StoreError, Transaction
from lengthwise.schema.errors import InputError

Result = TypeVar("Result")
Operation = Callable[[Transaction], Any]
_log = logging.getLogger("lengthwise.gateway.tenants")
_COLUMNS = ("requests", "prompt_tokens", "output_tokens", "cost", "reserved_tokens", "reserved_cost")
_ADD = f"""
INSERT INTO lengthwise_usage (subject, period, start_s, {", ".join(_COLUMNS)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (subject, period, start_s) DO UPDATE
SET {", ".join(f"{name} = lengthwise_usage.{name} + excluded.{name}" for name in _COLUMNS)}"""  # noqa: S608
_USED = """
SELECT requests, prompt_tokens + output_tokens + reserved_tokens, cost + reserved_cost FROM lengthwise_usage
WHERE subject = ? AND period = ? AND start_s = ?"""
_USAGE = f"""
SELECT subject, start_s, {", ".join(_COLUMNS)} FROM lengthwise_usage
WHERE period = ? AND (? = '' OR subject = ?) ORDER BY start_s DESC, subject LIMIT 1000"""  # noqa: S608
_OPEN = "INSERT INTO lengthwise_open VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_KEYS = """
SELECT id, sha256, created_s, previous_sha256, previous_until_s, settings FROM lengthwise_keys ORDER BY created_s, id"""
_KEEP_S = {"minute": 7200, "hour": 7 * 86_400, "day": 400 * 86_400}  # time for which usage of past windows stays
_MAX_OPEN_S = 40 * 86_400  # age from which a reservation of a lost gateway is deleted: all its windows have ended


def _add(transaction: Transaction, tenant: str, key_id: str, at_s: float, amounts: tuple[int, ...]) -> None:
    """Add amounts to the windows of a tenant and of a key that contain a time."""
    subjects = (f"key:{key_id}", f"tenant:{tenant}")
    starts = [(period, window(period, at_s)[0]) for period in PERIODS]
    transaction.many(_ADD, [(subject, *start, *amounts) for subject in subjects for start in starts])


def _reserve(
    transaction: Transaction, gateway: str, number: int, key: ManagedKey, now_s: float, amounts: tuple[int, int, int]
) -> tuple[Quota, int, int] | None:
    """Reserve one request with its tokens and cost, or return the quota that this exceeds, what is used, and its end.

    ``amounts`` are in the order of ``UNITS``. Of several quotas it is the one whose window ends last.
    """
    exceeded = []
    for quota in key.quotas:
        start_s, end_s = window(quota.period, now_s)
        rows = transaction.rows(_USED, quota.subject, quota.period, start_s)
        at = UNITS.index(quota.unit)
        used = int(rows[0][at]) if rows else 0
        if used + amounts[at] > quota.limit:
            exceeded.append((end_s, quota, used))
    if exceeded:
        end_s, quota, used = max(exceeded, key=lambda one: one[0])
        return quota, used, end_s
    _, tokens, price = amounts
    _add(transaction, key.settings.tenant, key.id, now_s, (1, 0, 0, 0, tokens, price))
    prices = key.tenant.input_cost_per_token, key.tenant.output_cost_per_token
    row = (gateway, number, key.settings.tenant, key.id, now_s, tokens, price, *prices)
    transaction.rows(_OPEN, *row)
    return None


def _settle(transaction: Transaction, gateway: str, number: int, tokens: tuple[int, int] | None) -> None:
    """Replace a reservation by prompt and output tokens. None: the request was never dispatched, and does not count."""
    rows = transaction.rows(
        "DELETE FROM lengthwise_open WHERE gateway = ? AND number = ? "
        "RETURNING tenant, key_id, admitted_s, tokens, cost, input_price, output_price",
        gateway,
        number,
    )
    for tenant, key_id, admitted_s, reserved, reserved_cost, *prices in rows:
        prompt, output = tokens or (0, 0)
        used = (0 if tokens else -1, prompt, output, cost(prompt, output, *prices), -reserved, -reserved_cost)
        _add(transaction, tenant, key_id, admitted_s, used)


def _load(transaction: Transaction) -> tuple[int, list[ManagedKey], dict[str, TenantSettings]]:
    """Return the number of changes so far, all keys, and all tenants."""
    changes = int(transaction.rows("SELECT changes FROM lengthwise_version")[0][0])
    tenants = {
        name: msgspec.json.decode(settings, type=TenantSettings)
        for name, settings in transaction.rows("SELECT name, settings FROM lengthwise_tenants ORDER BY name")
    }
    keys = []
    for key_id, digest, created_s, previous, until_s, text in transaction.rows(_KEYS):
        settings = msgspec.json.decode(text, type=KeySettings)
        tenant = tenants[settings.tenant]
        limits = quotas(f"key:{key_id}", settings.quotas) + quotas(f"tenant:{settings.tenant}", tenant.quotas)
        digests = ((digest, math.inf), *([(previous, until_s)] if previous else []))
        keys.append(ManagedKey(key_id, settings, digests, created_s, limits, tenant))
    return changes, keys, tenants


def _changed(transaction: Transaction) -> None:
    transaction.rows("UPDATE lengthwise_version SET changes = changes + 1")


@dataclass(slots=True)
class _InFlight:
    """A reservation, and the place of its tokens in the file of progress."""

    number: int
    slot: int


class Accounts(Listener):
    """The keys and the usage of a store. An async context manager, whose transactions run on a thread of its own.

    Reservations and settlements that come during a transaction share the next one. ``on_change`` is called with all
    tenants when the API or another gateway has changed keys or tenants. ``wall`` is the clock of the windows.
    """

    def __init__(self, config: TenantsConfig, *, wall: Clock = time.time) -> None:
        assert config.store is not None, "accounts have a store"
        self._config, self.wall = config, wall
        self._place = config.store
        self._store = Store(self._place)
        self.on_change: Callable[[dict[str, TenantSettings]], None] = lambda _: None
        self.keys: list[ManagedKey] = []
        self.tenants: dict[str, TenantSettings] = {}
        self._changes = -1
        self._prefix = f"{'lengthwise' if self._is_shared else Path(self._place).name}.progress-"
        self._gateway = f"{self._prefix}{secrets.token_hex(8)}"
        self._last_number = 0
        self._in_flight: dict[int, _InFlight] = {}
        self._unsettled: dict[int, tuple[_InFlight, tuple[int, int] | None]] = {}
        self._thread = ThreadPoolExecutor(1, "lengthwise-tenants")
        self._lock = threading.Lock()
        self._started_s = math.inf  # start of the transaction in progress
        self._is_down = False  # whether the last transaction failed
        self._pending: list[tuple[Operation, asyncio.Future[Any]]] = []
        self._stack = contextlib.AsyncExitStack()

    @property
    def _is_shared(self) -> bool:
        return self._place.startswith(POSTGRES)

    async def __aenter__(self) -> Self:
        folder = Path(self._config.progress or Path(self._place).parent)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, self._start, folder)
        except (StoreError, OSError) as error:
            self._thread.shutdown()
            raise InputError(f"the store of tenants must be usable at the start; {self._shown}: {error}") from error
        await self.reload()
        for work in (self._refresh(), self._interrupt()):
            await self._stack.enter_async_context(background(work))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        async with background(self._interrupt()):
            await self._retry()
            with contextlib.suppress(Fault):
                await self.flush()
            await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        self._thread.shutdown()
        self._progress.close(remove=not (self._in_flight or self._unsettled))

    @property
    def _shown(self) -> str:
        return "PostgreSQL" if self._is_shared else self._place

    def _start(self, folder: Path) -> None:
        self._store.prepare()
        with abandoned(folder, self._prefix) as files:
            self._store.transaction(lambda transaction: self._recover(transaction, files))
        self._progress = ProgressFile(folder, self._gateway)

    def _recover(self, transaction: Transaction, files: dict[str, dict[int, tuple[int, int]]]) -> None:
        """Settle the requests of killed gateways, and forget windows that ended long ago."""
        for gateway, slots in files.items():
            numbers = transaction.rows("SELECT number FROM lengthwise_open WHERE gateway = ?", gateway)
            for (number,) in numbers:
                _settle(transaction, gateway, number, slots.get(number))
            if numbers:
                _log.warning("settled %d requests of a gateway that was killed", len(numbers))
        for period, keep_s in _KEEP_S.items():
            old_s = int(self.wall() - keep_s)
            transaction.rows("DELETE FROM lengthwise_usage WHERE period = ? AND start_s < ?", period, old_s)
        transaction.rows("DELETE FROM lengthwise_open WHERE admitted_s < ?", self.wall() - _MAX_OPEN_S)

    def of_configured(self, key: Key, source: str = "file") -> ManagedKey | None:
        """Return the account of a key that is not in the store, or None if the store does not have its tenant.

        Its id begins with ``source``.
        """
        if (tenant := self.tenants.get(key.tenant)) is None:
            return None
        limits = quotas(f"tenant:{key.tenant}", tenant.quotas)
        key_id = f"{source}_{key.sha256[:12].lower()}"
        return ManagedKey(key_id, KeySettings(key.tenant), ((key.sha256, math.inf),), 0.0, limits, tenant)

    # Requests:

    async def reserve(self, key: ManagedKey, request: Request, output_tokens: float) -> None:
        """Reserve prompt and output tokens of a request for its key and its tenant.

        Raises Fault: 429 if that exceeds a quota, with Retry-After to the end of its window; 503 without the store.
        """
        if self._config.reserve == "max_tokens":
            output_tokens = request.choices * request.max_tokens
        output, now_s = math.ceil(output_tokens), self.wall()
        amounts = 1, request.prompt_tokens + output, key.cost(request.prompt_tokens, output)
        self._last_number += 1
        number = self._last_number
        made = asyncio.ensure_future(self._run(lambda one: _reserve(one, self._gateway, number, key, now_s, amounts)))
        try:
            exceeded = await asyncio.shield(made)
        except asyncio.CancelledError:
            made.add_done_callback(lambda done: self._cancel(number, done))
            raise
        except Fault as fault:
            if isinstance(fault.__cause__, StoreError) and fault.__cause__.is_unknown:
                self._settle(_InFlight(number, self._progress.add(number)), None)
            raise
        if exceeded is None:
            self._in_flight[request.id] = _InFlight(number, self._progress.add(number))
            return
        quota, used, end_s = exceeded
        subject = "API key" if quota.subject.startswith("key:") else "tenant"
        unit = COST_UNIT if quota.unit == "cost" else 1
        needed = amounts[UNITS.index(quota.unit)]
        until = datetime.fromtimestamp(end_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        message = (
            f"The {quota.name} of this {subject} are {quota.limit / unit:g}; {used / unit:g} are used or reserved, and "
            f"this request needs {needed / unit:g}. "
        )
        message += "It fits no window." if needed > quota.limit else f"The window ends at {until}."
        raise Fault(429, "quota", message, code="quota_exceeded", retry_after_s=end_s - now_s)

    def settle(self, request: Request, tokens: tuple[int, int] | None) -> None:
        """Replace the reservation of a request by its prompt and output tokens, or by nothing (None)."""
        if (one := self._in_flight.pop(request.id, None)) is not None:
            if tokens is not None:
                self._progress.set(one.slot, one.number, *tokens)
            self._settle(one, tokens)

    def tokens(self, request: Request, new_tokens: int, now_s: float) -> None:  # noqa: ARG002, D102
        if (one := self._in_flight.get(request.id)) is not None:
            prompt_tokens = request.dispatch.reported_prompt_tokens or request.prompt_tokens
            self._progress.set(one.slot, one.number, prompt_tokens, request.generated_tokens)

    def dispatched(self, request: Request, worker: str, now_s: float) -> None:  # noqa: ARG002, D102
        self.tokens(request, 0, now_s)

    def on_end(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:  # noqa: ARG002, D102
        if not math.isnan(request.dispatch.dispatched_s):
            self.tokens(request, 0, now_s)

    async def flush(self) -> int:
        """Wait for all transactions so far. Return how many ended requests the store has not taken."""
        await self._run(lambda _: None)
        return len(self._unsettled)

    def _settle(self, one: _InFlight, tokens: tuple[int, int] | None) -> None:
        self._unsettled[one.number] = one, tokens
        done = asyncio.ensure_future(self._run(lambda each: _settle(each, self._gateway, one.number, tokens)))
        done.add_done_callback(lambda future: self._settled(one, future))

    def _settled(self, one: _InFlight, done: asyncio.Future[None]) -> None:
        if not done.cancelled() and done.exception() is None and self._unsettled.pop(one.number, None) is not None:
            self._progress.remove(one.slot)

    def _cancel(self, number: int, done: asyncio.Future[Any]) -> None:
        """Undo a reservation whose client left while it was made."""
        if not done.cancelled() and done.exception() is None and done.result() is None:
            self._settle(_InFlight(number, self._progress.add(number)), None)

    # Changes through the API:

    async def put_tenant(self, name: str, settings: TenantSettings) -> None:
        """Add a tenant, or replace its settings. Raises InputError."""
        check_prices(settings, settings.quotas)
        for key in self.keys:
            if key.settings.tenant == name:
                check_prices(settings, key.settings.quotas)
        quotas("", settings.quotas)

        def work(transaction: Transaction) -> None:
            transaction.rows("DELETE FROM lengthwise_tenants WHERE name = ?", name)
            text = msgspec.json.encode(settings).decode()
            transaction.rows("INSERT INTO lengthwise_tenants VALUES (?, ?)", name, text)
            _changed(transaction)

        await self._change(work)

    async def add_key(self, settings: KeySettings) -> tuple[ManagedKey, str]:
        """Return a new key and its secret, which is stored nowhere. Raises InputError."""
        if (tenant := self.tenants.get(settings.tenant)) is None:
            raise InputError(
                f"there must be the tenant {settings.tenant}; add it first: PUT /admin/tenants/{settings.tenant}"
            )
        check_prices(tenant, settings.quotas)
        quotas("", settings.quotas)
        key_id, secret, digest = f"k_{secrets.token_hex(6)}", *_new_secret()
        row = (key_id, settings.tenant, digest, self.wall(), "", 0.0, msgspec.json.encode(settings).decode())

        def work(transaction: Transaction) -> None:
            transaction.rows("INSERT INTO lengthwise_keys VALUES (?, ?, ?, ?, ?, ?, ?)", *row)
            _changed(transaction)

        await self._change(work)
        return self.key(key_id), secret

    async def rotate_key(self, key_id: str, grace_s: float) -> tuple[ManagedKey, str]:
        """Return a key with a new secret, and the secret. The old one is valid for ``grace_s``. Raises KeyError."""
        secret, digest = _new_secret()
        until_s = self.wall() + grace_s

        def work(transaction: Transaction) -> list[Any]:
            _changed(transaction)
            return transaction.rows(
                "UPDATE lengthwise_keys SET previous_sha256 = sha256, previous_until_s = ?, sha256 = ? WHERE id = ? "
                "RETURNING id",
                until_s,
                digest,
                key_id,
            )

        if not await self._change(work):
            raise KeyError(key_id)
        return self.key(key_id), secret

    async def revoke_key(self, key_id: str) -> None:
        """Delete a key. Its usage stays. Raises KeyError if there is no such key."""

        def work(transaction: Transaction) -> list[Any]:
            _changed(transaction)
            return transaction.rows("DELETE FROM lengthwise_keys WHERE id = ? RETURNING id", key_id)

        if not await self._change(work):
            raise KeyError(key_id)

    async def usage(self, period: str, subject: str = "") -> list[dict[str, Any]]:
        """Return the usage of a subject ("": all) in the windows of a period, the latest first."""

        def work(transaction: Transaction) -> list[tuple[Any, ...]]:
            return transaction.rows(_USAGE, period, subject, subject)

        found = []
        for name, start_s, *values in await self._run(work):
            kind, _, owner = name.partition(":")
            row = {kind: owner, "start": datetime.fromtimestamp(start_s, UTC).isoformat()}
            amounts = dict(zip(_COLUMNS, values, strict=True))
            found.append(row | {one: n / COST_UNIT if one.endswith("cost") else n for one, n in amounts.items()})
        return found

    def key(self, key_id: str) -> ManagedKey:
        """Return the key with this id."""
        return next(key for key in self.keys if key.id == key_id)

    async def _change(self, work: Callable[[Transaction], Result]) -> Result:
        result = await self._run(work)
        await self.reload()
        return result

    async def reload(self) -> None:
        """Read keys and tenants if they have changed."""
        changes, keys, tenants = await self._run(_load)
        if changes > self._changes:
            self._changes, self.keys, self.tenants = changes, keys, tenants
            self.on_change(tenants)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(self._config.refresh_s)
            with contextlib.suppress(Fault):
                await self._retry()
                await self.reload()

    async def _interrupt(self) -> None:
        """Interrupt transactions of a store that hangs, so that their callers and later ones need not wait for it."""
        while True:
            await asyncio.sleep(INTERRUPT_S / 4)
            if time.monotonic() - self._started_s > INTERRUPT_S:
                self._store.interrupt()

    async def _retry(self) -> None:
        """Settle the requests again that the store did not take. They stay in the file of progress until it does."""
        for one, tokens in list(self._unsettled.values()):
            self._settle(one, tokens)

    async def _run(self, work: Callable[[Transaction], Result]) -> Result:
        """Return the result of ``work`` in a transaction. Raises Fault (503) if the store cannot be used."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._pending.append((work, future))
            first = len(self._pending) == 1
        if first:
            self._thread.submit(self._commit, asyncio.get_running_loop())
        try:
            result: Result = await future
        except StoreError as error:
            message, after_s = "The gateway cannot reach its store of tenants.", self._config.refresh_s
            raise Fault(503, "store", message, code="store_unavailable", retry_after_s=after_s) from error
        return result

    def _commit(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            batch, self._pending = self._pending, []
        self._started_s = time.monotonic()
        results = self._results([work for work, _ in batch])
        self._started_s = math.inf

        def resolve() -> None:
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    is_error = isinstance(result, StoreError)
                    future.set_exception(result) if is_error else future.set_result(result)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(resolve)

    def _results(self, works: list[Operation]) -> list[Any]:
        """Return the results of one transaction. If an operation is wrong, each has one of its own, and may fail."""
        try:
            results = self._store.transaction(lambda one: [work(one) for work in works])
        except Exception as error:  # noqa: BLE001 - each caller gets it
            if len(works) > 1 and not isinstance(error, StoreError):
                return [self._results([one])[0] for one in works]
            if not self._is_down:  # not for each request while it is down
                _log.warning("the store of tenants failed: %s", error)
            self._is_down = isinstance(error, StoreError)
            return [error if isinstance(error, StoreError) else StoreError(repr(error))] * len(works)
        if self._is_down:
            self._is_down = False
            _log.info("the store of tenants works again")
        return results


def _new_secret() -> tuple[str, str]:
    secret = f"lw-{secrets.token_urlsafe(32)}"
    return secret, hashlib.sha256(secret.encode()).hexdigest()
