"""The scheduler of one of several gateways that share a queue. It reads no clock and uses no network."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from lengthwise.gateway.config import Admission, Dispatch, Order
from lengthwise.gateway.core import Scheduler
from lengthwise.gateway.core.ranking import State, TenantService
from lengthwise.gateway.core.worker import NO_LIMIT
from lengthwise.gateway.edge.auth import Tenants
from lengthwise.gateway.request import LengthPrediction, Refusal, Request
from lengthwise.gateway.scheduling import Decisions, SharedState, Statistics, WorkerState
from lengthwise.gateway.shared_queue import messages
from lengthwise.gateway.shared_queue.leader import Leader, Member, split_operations
from lengthwise.gateway.shared_queue.messages import Envelope, Operation

_log = logging.getLogger("lengthwise.gateway.shared_queue")
_TOO_LARGE = Refusal(400, "shared_queue", "The names of model, tenant and session are too long for the shared queue.")
HEARTBEATS_PER_LEASE = 4


class SharedScheduler(Scheduler):
    """The scheduler of a gateway that shares its queue with others.

    While it is ``shared``, it reports every event to the leader and carries out the leader's decisions; its own queues,
    workers and counters record these. Without a leader it decides itself, with its share of the slots of each engine.
    It calls ``on_outgoing`` when ``outgoing`` has messages to send at once, ``usage`` for the usage of keys here, and
    ``on_usage`` with the usage at each other gateway.
    """

    def __init__(
        self, order: Order, admission: Admission, dispatch: Dispatch, *, gateway: str, lease_s: float, tenants: Tenants
    ) -> None:
        super().__init__(order, admission, dispatch)
        self.gateway, self.lease_s, self._tenants, self._dispatch = gateway, lease_s, tenants, dispatch
        self.on_outgoing: Callable[[], None] = lambda: None
        self.usage: Callable[[], list[Any]] = list  # usage of keys since the last call
        self.on_usage: Callable[[str, list[Any] | None], None] = lambda *_: None
        self.shared, self.leader, self.epoch = False, "", 0
        self.gateways: tuple[str, ...] = (gateway,)  # all that are alive, sorted
        self._leading: Leader | None = None
        self._own_member: Member | None = None
        self._lease_until_s = self._last_message_s = -math.inf
        self._session = self._sent = self._received = 0
        self._operations: list[Operation] = []
        self._progress: dict[int, None] = {}
        self._known: set[int] = set()  # requests that the leader knows
        self._inbox: list[Sequence[Any]] = []
        self._states: Sequence[WorkerState] = ()
        self._limits: dict[str, int] = {}  # of the engines, for all gateways together
        self._shared_service = TenantService()
        self._overall: dict[str, Any] = {}

    @property
    def leads(self) -> bool:
        """Whether this gateway is the leader."""
        return self._leading is not None

    def slots_in_use(self) -> int:
        """Return how many requests are at engines: of all gateways if this one leads, otherwise of this one."""
        deciding = self if self._leading is None else self._leading.scheduler
        return sum(len(one.active) for one in deciding.worker_pool)

    # Events of this gateway:

    def offer(self, now_s: float, request: Request) -> Refusal | None:  # noqa: D102 - as Scheduler
        if (refusal := super().offer(now_s, request)) is None and self.shared:
            if (fields := self._fields(now_s, request)) is None:
                super().remove(now_s, request.id)
                return _TOO_LARGE
            self._known.add(request.id)
            self._post(now_s, "offer", request.id, fields)
        return refusal

    def repredict(self, now_s: float, id: int, length_prediction: LengthPrediction) -> None:  # noqa: A002, D102
        super().repredict(now_s, id, length_prediction)
        self._post(now_s, "repredict", id, messages.prediction_fields(length_prediction))

    def on_progress(self, now_s: float, id: int, generated_tokens: int) -> None:  # noqa: A002, D102
        super().on_progress(now_s, id, generated_tokens)
        if self.leads:
            self._post(now_s, "progress", id, generated_tokens)
        elif self.shared:
            self._progress[id] = None

    def mark_nonpreemptible(self, now_s: float, id: int) -> None:  # noqa: A002, D102
        super().mark_nonpreemptible(now_s, id)
        self._post(now_s, "nonpreemptible", id)

    def requeue(self, now_s: float, id: int, generated_tokens: int, *, avoid: str = "") -> None:  # noqa: A002, D102
        super().requeue(now_s, id, generated_tokens, avoid=avoid)
        self._progress.pop(id, None)
        if id in self._known:
            self._post(now_s, "requeue", id, generated_tokens, avoid)
        elif self.shared and id in self.entries:
            self._resume(now_s, id)

    def on_queue_full(self, now_s: float, worker: str, id: int, retry_after_s: float = 0.0) -> bool:  # noqa: A002, D102
        self._post(now_s, "full", id, worker, retry_after_s)
        return super().on_queue_full(now_s, worker, id, retry_after_s)

    def remove(self, now_s: float, id: int, *, client_gone: bool = False) -> None:  # noqa: A002, D102
        if id in self._known:
            self._known.discard(id)
            self._progress.pop(id, None)
            self._post(now_s, "end", id, self.entries[id].request.generated_tokens, client_gone)
        super().remove(now_s, id, client_gone=client_gone)

    def update_workers(self, now_s: float, states: Sequence[WorkerState]) -> tuple[int, ...]:  # noqa: D102
        renewed = {one.name for one in states} != {one.name for one in self._states}
        self._states = states
        lost = super().update_workers(now_s, states if self.shared else self._own_share(states))
        if self._leading is not None:
            self._leading.scheduler.update_workers(now_s, states)
            self._post(now_s, "workers", [one.name for one in states])
        elif self.shared and renewed:
            self._join(now_s)
        return lost

    def configure(self, now_s: float, order: Order, admission: Admission, dispatch: Dispatch) -> None:  # noqa: D102
        super().configure(now_s, order, admission, dispatch)
        self._dispatch = dispatch
        if self._leading is not None:
            self._leading.scheduler.configure(now_s, order, admission, dispatch)

    def statistics(self, now_s: float) -> Statistics:
        """Return the numbers of this gateway, with the backlog and the predicted wait of the shared queue."""
        leader = self.leader if self.shared else ""
        state = SharedState(self.shared, self.leads, self.gateway, leader, len(self.gateways), self.epoch)
        return replace(super().statistics(now_s), shared_queue=state, **(self._overall if self.shared else {}))

    # Decisions:

    def schedule(self, now_s: float) -> Decisions:
        """Return the leader's decisions about requests of this gateway or, without a leader, its own decisions."""
        if self._leading is not None and now_s >= self._lease_until_s:
            self.leave(now_s, "its lease has ended")
        elif self.shared and not self.leads and now_s >= self._last_message_s + self.lease_s:
            self.leave(now_s, f"the leader {self.leader} is silent")
        if not self.shared:
            return super().schedule(now_s)
        self._changed = False
        if self._leading is not None and self._own_member is not None:
            self._leading.scheduler.service.weights = self.service.weights
            self._leading.schedule(now_s)
            operations, self._own_member.operations = self._own_member.operations, []
            self._apply(operations)
            if self._leading.has_outgoing:
                self.on_outgoing()
        inbox, self._inbox = self._inbox, []
        assigned, preempted, expired = list[tuple[int, str]](), list[int](), list[tuple[int, Refusal]]()
        for name, *arguments in inbox:
            if name == "assign" and self._assigned(now_s, *arguments):
                assigned.append((arguments[0], arguments[1]))
            elif name == "preempt" and self.preempt(now_s, arguments[0]):
                preempted.append(arguments[0])
            elif name == "expire" and self.is_queued(arguments[0]):
                self._known.discard(arguments[0])
                super().remove(now_s, arguments[0])
                expired.append((arguments[0], Refusal(*arguments[1])))
        self._changed = False
        return Decisions(tuple(expired), tuple(preempted), tuple(assigned))

    def _assigned(self, now_s: float, id: int, worker: str) -> bool:  # noqa: A002
        """Dispatch a request, unless it no longer waits or this gateway does not know the worker yet."""
        if not self.is_queued(id):
            return False
        if worker not in self.worker_pool:
            self._post(now_s, "requeue", id, self.entries[id].request.generated_tokens, worker)
            return False
        self.assign(now_s, id, worker)
        return True

    def _apply(self, operations: Sequence[Sequence[Any]]) -> None:
        for operation in operations:
            if operation[0] == "used":
                self.on_usage(operation[1], operation[2])
            elif operation[0] in ("overall", "limits", "service"):
                self._store(operation)
            else:
                self._inbox.append(operation)

    def _store(self, operation: Sequence[Any]) -> None:
        """Store statistics, limits and service that the leader has sent."""
        name, *arguments = operation
        if name == "overall":
            self._overall = arguments[0]
        elif name == "limits":
            self._limits |= dict(arguments[0])
        elif name == "service":
            self._shared_service.level = arguments[1]
            charges = {self._tenants.number(tenant): tokens for tenant, tokens in arguments[0]}
            self._shared_service.served |= charges

    def next_s(self, now_s: float) -> float:  # noqa: D102 - as Scheduler
        if not self.shared:
            return super().next_s(now_s)
        if self._inbox or self._changed:
            return now_s
        if self._leading is not None:
            return min(self._leading.next_s(now_s), self._lease_until_s)
        return self._last_message_s + self.lease_s

    # Messages and leases:

    def receive(self, now_s: float, message: bytes) -> None:
        """Process a message of another gateway. The next call of ``schedule`` carries out the decisions in it."""
        envelope = msgspec.json.decode(message, type=Envelope)
        if self._leading is not None and envelope.epoch == self._leading.epoch:
            self._leading.receive(now_s, envelope)
            self.on_outgoing()
            return
        if envelope.epoch < self.epoch:
            return
        is_new = envelope.epoch > self.epoch
        if is_new:
            if self.leads:
                self.leave(now_s, "another gateway leads")
            self.epoch, self.leader = envelope.epoch, envelope.sender
        if envelope.sender != self.leader:
            return
        if envelope.number < 0:  # outside of a session
            (operation,) = envelope.decoded()
            if is_new or not self.shared or (operation[0] == "rejoin" and envelope.session == self._session):
                self._join(now_s)
            return
        if self.shared and envelope.session != self._session:
            return
        self._last_message_s = now_s
        if not self.shared or envelope.number != self._received:  # the queue was local, or a message is missing
            self._join(now_s)
            return
        self._received += 1
        self._apply(envelope.decoded())

    def outgoing(self) -> list[tuple[str, bytes]]:
        """Return the pending messages, each with the gateway that receives it, and clear them."""
        if self._leading is not None:
            return self._leading.outgoing()
        progress, self._progress = self._progress, {}
        operations, self._operations = self._operations, []
        operations += [("progress", one, self.entries[one].request.generated_tokens) for one in progress]
        if not (self.shared and operations):
            return []
        made = messages.envelopes(self.gateway, self.epoch, self._session, self._sent, operations)
        self._sent += len(made)
        return [(self.leader, one) for one in made]

    def heartbeat(self, now_s: float, sent_s: float, leader: str, epoch: int, gateways: Collection[str]) -> None:
        """Apply the state of the store, read at ``sent_s`` or later: ``leader`` ("": none) has the lease."""
        self.gateways = tuple(sorted({*gateways, self.gateway}))
        if leader == self.gateway:
            self._lease_until_s = sent_s + self.lease_s
            if self._leading is None or self._leading.epoch != epoch:
                self._lead(now_s, epoch)
        elif self.leads:
            self.leave(now_s, "another gateway has the lease")
        if self._leading is not None:
            self._leading.heartbeat(now_s, self.gateways)
            self._changed = True
            self.on_outgoing()
        elif self.shared:
            self._post(now_s, "heartbeat")
        if self.shared:
            for operation in split_operations("used", self.usage()):
                self._post(now_s, *operation)

    def leave(self, now_s: float, reason: str) -> None:
        """Make the queue local, with this gateway's share of the slots. Log the reason unless it is empty."""
        if not self.shared:
            return
        if reason:
            _log.warning("the queue is local, with 1/%d of the slots: %s", len(self.gateways), reason)
        if self._leading is not None:
            self._limits = {one.name: one.limit for one in self._leading.scheduler.worker_pool if one.limit != NO_LIMIT}
            self._shared_service = self._leading.scheduler.service
        self.shared, self._leading, self._own_member = False, None, None
        self._known.clear()
        for pending in (self._inbox, self._operations, self._progress):
            pending.clear()
        for gateway in self.gateways:
            self.on_usage(gateway, None)
        self.service.served |= self._shared_service.served
        self.service.level = self._shared_service.level
        super().update_workers(now_s, self._own_share(self._states))

    def announce_stop(self, now_s: float) -> None:
        """Report to the leader that this gateway stops, so that its slots return at once."""
        if not self.leads:
            self._post(now_s, "leave")

    def _lead(self, now_s: float, epoch: int) -> None:
        self.leave(now_s, "")
        self.leader, self.epoch, self.shared = self.gateway, epoch, True
        scheduler = Scheduler(self.order, self.admission, self._dispatch)
        scheduler.update_workers(now_s, self._states)
        scheduler.service.served = dict(self._shared_service.served)
        scheduler.service.level = self._shared_service.level
        self._leading = Leader(scheduler, self.gateway, epoch, now_s, self.lease_s, set(self.gateways), self._tenants)
        self._own_member = self._leading.join_self(now_s)
        self._post_state(now_s)
        _log.info("the queue is shared; this gateway leads, epoch %d; gateways: %d", epoch, len(self.gateways))

    def _join(self, now_s: float) -> None:
        if not self.shared:
            _log.info("the queue is shared; the gateway %s leads, epoch %d", self.leader, self.epoch)
        self.shared, self._last_message_s = True, now_s
        self._session, self._sent, self._received = self._session + 1, 0, 0
        for pending in (self._inbox, self._operations, self._progress):
            pending.clear()
        self._post(now_s, "join")
        self._post_state(now_s)

    def _post_state(self, now_s: float) -> None:
        super().update_workers(now_s, self._states)
        names = [one.name for one in self._states]
        for operation in split_operations("workers", names):
            self._post(now_s, *operation)
        self._known.clear()
        for one, entry in self.entries.items():
            if entry.state is not State.LOST:  # the task of a lost request queues it again or ends it
                self._resume(now_s, one)
        self._post(now_s, "joined")

    def _resume(self, now_s: float, id: int) -> None:  # noqa: A002
        entry = self.entries[id]
        if (fields := self._fields(now_s, entry.request)) is not None:
            self._known.add(id)
            self._post(now_s, "resume", id, fields, messages.state_fields(now_s, entry))
        else:  # a running request is refused only if it waits again
            self._inbox.append(("expire", id, messages.refusal_fields(_TOO_LARGE)))

    def _fields(self, now_s: float, request: Request) -> dict[str, Any] | None:
        """Return ``request_fields`` of a request, or None if they do not fit into a message."""
        fields = messages.request_fields(now_s, request, self._tenants[request.client.tenant])
        fits = self.leads or len(messages.encode(fields)) <= messages.MAX_BYTES - 500
        return fields if fits else None

    def _post(self, now_s: float, *operation: Any) -> None:
        if self._leading is not None and self._own_member is not None:
            self._leading.apply(now_s, self._own_member, operation)
        elif self.shared:
            self._operations.append(operation)
            self.on_outgoing()

    def _own_share(self, states: Sequence[WorkerState]) -> list[WorkerState]:
        """Return the engines with this gateway's share of their slots, at least one of each, as limits."""
        count, place = len(self.gateways), self.gateways.index(self.gateway)
        numbers = {name: at for at, name in enumerate(sorted(one.name for one in states))}
        shares = []
        for state in states:
            limit = self._limits.get(state.name) or state.concurrency
            own = None if limit is None else max(1, (limit + (place + numbers[state.name]) % count) // count)
            shares.append(replace(state, concurrency=own))
        return shares
