"""The leader of a shared queue, which schedules the requests of all gateways. It uses no clock or network."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from lengthwise.gateway.core import Scheduler
from lengthwise.gateway.core.ranking import State
from lengthwise.gateway.core.worker import NO_LIMIT
from lengthwise.gateway.edge.auth import Tenants
from lengthwise.gateway.request import Request
from lengthwise.gateway.shared_queue import messages
from lengthwise.gateway.shared_queue.messages import Envelope, Operation

_log = logging.getLogger("lengthwise.gateway.shared_queue")
_MAX_ITEMS = 20  # of an operation
_EVENTS = ("progress", "repredict", "nonpreemptible", "requeue", "full", "end")  # operations on a request


@dataclass(slots=True, eq=False)
class Member:
    """A gateway that has joined, as the leader knows it."""

    gateway: str
    session: int
    last_message_s: float
    received: int = 0  # envelopes
    sent: int = 0  # envelopes
    workers: frozenset[str] = frozenset()
    ids: dict[int, int] = field(default_factory=dict)  # from the gateway's id of a request to the leader's
    operations: list[Operation] = field(default_factory=list)  # to send


class Leader:
    """Schedules the requests of all gateways with a Scheduler of its own.

    It decides nothing until every gateway in ``awaited`` has joined with its requests, or a lease has passed, so that
    it knows all slots in use. It removes the requests of a gateway from which no message came for a lease.
    """

    def __init__(
        self, scheduler: Scheduler, gateway: str, epoch: int, start_s: float, lease_s: float, awaited: Collection[str],
        tenants: Tenants,
    ) -> None:  # fmt: skip
        self.scheduler, self.epoch = scheduler, epoch
        self._gateway, self._lease_s, self._tenants = gateway, lease_s, tenants
        self._awaited, self._awaited_until_s = set(awaited), start_s + lease_s
        self._members: dict[str, Member] = {}
        self._owners: dict[int, tuple[Member, int]] = {}
        self._ids = itertools.count(1)
        self._controls: list[tuple[str, int, Operation]] = []  # outside of sessions: gateway, its session, operation
        self._sent_service: dict[int, float] = {}
        self.overall: dict[str, Any] = {}

    # Messages:

    def receive(self, now_s: float, envelope: Envelope) -> None:
        """Carry out the operations of a gateway. After a gap in its envelopes the gateway must join again."""
        member, operations = self._members.get(envelope.sender), envelope.decoded()
        begins = envelope.number == 0 and bool(operations) and operations[0][0] == "join"
        if begins and (member is None or member.session < envelope.session):
            member = self._join(now_s, envelope.sender, envelope.session)
        if member is None or (member.session, member.received) != (envelope.session, envelope.number):
            if member is None or envelope.session >= member.session:
                self._controls.append((envelope.sender, envelope.session, ("rejoin",)))
            return
        member.received += 1
        member.last_message_s = now_s
        for operation in operations:
            self.apply(now_s, member, operation)

    def join_self(self, now_s: float) -> Member:
        """Add the leader's own gateway, which calls ``apply`` instead of sending envelopes, and return its member."""
        member = self._join(now_s, self._gateway, 0)
        member.last_message_s = math.inf
        return member

    def apply(self, now_s: float, member: Member, operation: Sequence[Any]) -> None:
        """Carry out one operation of a gateway. An event of a request that the leader has refused has no effect."""
        name, *arguments = operation
        if name in _EVENTS:
            own, *rest = arguments
            if own in member.ids:
                getattr(self, f"_on_{name}")(now_s, member.ids[own], *rest)
        elif name not in ("join", "heartbeat"):
            getattr(self, f"_on_{name}")(now_s, member, *arguments)

    @property
    def has_outgoing(self) -> bool:
        """Whether ``outgoing`` has messages."""
        others = (one for one in self._members.values() if one.gateway != self._gateway)
        return bool(self._controls) or any(one.operations for one in others)

    def outgoing(self) -> list[tuple[str, bytes]]:
        """Return the pending messages, each with the gateway that receives it, and clear them."""
        found = []
        for member in self._members.values():
            if member.gateway != self._gateway and member.operations:
                operations, member.operations = member.operations, []
                made = messages.envelopes(self._gateway, self.epoch, member.session, member.sent, operations)
                member.sent += len(made)
                found += [(member.gateway, one) for one in made]
        controls, self._controls = self._controls, []
        for gateway, session, operation in controls:
            found += [(gateway, one) for one in messages.envelopes(self._gateway, self.epoch, session, -1, [operation])]
        return found

    def heartbeat(self, now_s: float, gateways: Collection[str]) -> None:
        """Remove silent gateways, let new ones join, and send statistics, limits and service to all."""
        for member in [one for one in self._members.values() if one.last_message_s + self._lease_s <= now_s]:
            _log.warning("the gateway %s is silent; its %d requests are removed", member.gateway, len(member.ids))
            self._forget(now_s, member)
        for gateway in gateways:
            if gateway not in self._members:
                self._controls.append((gateway, 0, ("hello",)))
        statistics, pool = self.scheduler.statistics(now_s), self.scheduler.worker_pool
        self.overall = {name: getattr(statistics, name) for name in ("backlog_s", "predicted_wait_s")}
        limits = [(one.name, one.limit) for one in pool if one.limit != NO_LIMIT]
        served = self.scheduler.service.served
        changed = {one: tokens for one, tokens in served.items() if self._sent_service.get(one) != tokens}
        self._sent_service = dict(served)
        operations: list[Operation] = [("overall", self.overall), *split_operations("limits", limits)]
        self._broadcast(self._members.values(), operations, changed)

    def schedule(self, now_s: float) -> None:
        """Let the scheduler decide, and address each decision to the gateway of its request."""
        if self.next_s(now_s) > now_s:
            return
        decisions = self.scheduler.schedule(now_s)
        for one, refusal in decisions.expire:
            member, own = self._owners.pop(one)
            del member.ids[own]
            member.operations.append(("expire", own, messages.refusal_fields(refusal)))
        for one in decisions.preempt:
            member, own = self._owners[one]
            member.operations.append(("preempt", own))
        for one, worker in decisions.assign:
            member, own = self._owners[one]
            member.operations.append(("assign", own, worker))

    def next_s(self, now_s: float) -> float:
        """Return the time of the next call of ``schedule`` if no event comes before it, or inf."""
        if self._awaited and now_s < self._awaited_until_s:
            return self._awaited_until_s
        return self.scheduler.next_s(now_s)

    # Members:

    def _join(self, now_s: float, gateway: str, session: int) -> Member:
        if (before := self._members.get(gateway)) is not None:
            self._forget(now_s, before)
        self._reset_usage(gateway)
        member = self._members[gateway] = Member(gateway, session, now_s)
        return member

    def _forget(self, now_s: float, member: Member) -> None:
        del self._members[member.gateway]
        self._reset_usage(member.gateway)
        for one in member.ids.values():
            del self._owners[one]
            self.scheduler.remove(now_s, one, client_gone=True)

    def _reset_usage(self, gateway: str) -> None:
        for member in self._members.values():
            member.operations.append(("used", gateway, None))

    def _broadcast(self, members: Collection[Member], operations: list[Operation], service: dict[int, float]) -> None:
        charges = [(self._tenants[number], tokens) for number, tokens in service.items()]
        operations += [(*one, self.scheduler.service.level) for one in split_operations("service", charges)]
        for member in members:
            member.operations += operations

    # Operations of members:

    def _on_workers(self, now_s: float, member: Member, names: list[str]) -> None:  # noqa: ARG002
        member.workers |= frozenset(names)

    def _on_joined(self, now_s: float, member: Member) -> None:  # noqa: ARG002
        self._awaited.discard(member.gateway)
        self._broadcast([member], [("overall", self.overall)], dict(self.scheduler.service.served))

    def _on_used(self, now_s: float, member: Member, usage: list[Any]) -> None:  # noqa: ARG002
        for other in self._members.values():
            if other is not member:
                other.operations.append(("used", member.gateway, usage))

    def _on_leave(self, now_s: float, member: Member) -> None:
        self._awaited.discard(member.gateway)
        self._forget(now_s, member)

    def _on_offer(self, now_s: float, member: Member, own: int, fields: dict[str, Any]) -> None:
        request = self._request(now_s, member, fields)
        if (refusal := self.scheduler.offer(now_s, request)) is not None:
            member.operations.append(("expire", own, messages.refusal_fields(refusal)))
        else:
            self._register(member, own, request)

    def _on_resume(self, now_s: float, member: Member, own: int, fields: dict[str, Any], state: list[Any]) -> None:
        """Admit a request that its gateway had admitted before it joined, in the state that it has there."""
        scheduler, request = self.scheduler, self._request(now_s, member, fields)
        request.dispatch = messages.read_dispatch(state)
        worker, ago_s, (dispatches, _, charged_tokens, _), nonpreemptible = state
        entry = scheduler.admit(now_s, request, now_s if worker else now_s - ago_s)
        self._register(member, own, request)
        entry.dispatches, entry.charged_tokens = dispatches, charged_tokens
        if not worker:
            return
        if worker not in scheduler.worker_pool:  # unknown to the leader, which so counts no slot of it
            scheduler.queue.remove(entry)
            entry.state = State.LOST
            return
        scheduler.assign(now_s, request.id, worker)
        entry.dispatches, entry.preemption.nonpreemptible = dispatches, nonpreemptible
        request.dispatch.dispatched_s = now_s - ago_s
        if request.generated_tokens:
            entry.last_token_s = now_s

    def _request(self, now_s: float, member: Member, fields: dict[str, Any]) -> Request:
        tenant = self._tenants.number(fields["client"][0])
        return messages.read_request(now_s, next(self._ids), fields, tenant, member.workers)

    def _register(self, member: Member, own: int, request: Request) -> None:
        member.ids[own], self._owners[request.id] = request.id, (member, own)

    # Events of requests, by the leader's ids:

    def _on_progress(self, now_s: float, one: int, generated_tokens: int) -> None:
        self.scheduler.on_progress(now_s, one, generated_tokens)

    def _on_repredict(self, now_s: float, one: int, fields: list[Any]) -> None:
        self.scheduler.repredict(now_s, one, messages.read_prediction(fields))

    def _on_nonpreemptible(self, now_s: float, one: int) -> None:
        self.scheduler.mark_nonpreemptible(now_s, one)

    def _on_requeue(self, now_s: float, one: int, generated_tokens: int, avoid: str) -> None:
        self.scheduler.requeue(now_s, one, generated_tokens, avoid=avoid)

    def _on_full(self, now_s: float, one: int, worker: str, retry_after_s: float) -> None:
        self.scheduler.on_queue_full(now_s, worker, one, retry_after_s)

    def _on_end(self, now_s: float, one: int, generated_tokens: int, client_gone: bool) -> None:
        member, own = self._owners.pop(one)
        del member.ids[own]
        self.scheduler.on_progress(now_s, one, generated_tokens)
        self.scheduler.remove(now_s, one, client_gone=client_gone)


def split_operations(name: str, items: list[Any]) -> list[Operation]:
    """Return operations of this name with at most _MAX_ITEMS items each, so that each fits into a message."""
    return [(name, items[at : at + _MAX_ITEMS]) for at in range(0, len(items), _MAX_ITEMS)]
