"""What tenants were served: the virtual token counter (VTC, Sheng et al., OSDI '24)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lengthwise.gateway.core.entry import Entry
from lengthwise.policy.contracts import SERVICE_OUTPUT_WEIGHT


class Service:
    """A tenant's service: prompt tokens + 2 x output tokens, the output charged by prediction when it is sent.

    What came instead is charged when it comes back or ends. A tenant that comes to wait starts level with
    those who do, so that absence earns no credit.
    """

    def __init__(self) -> None:
        self._served: dict[int, float] = {}
        self._waiting: dict[int, int] = {}
        self._level = 0.0
        self._tenant_of_row = np.zeros(0, np.int64)

    def of(self, tenant: int) -> float:
        """What it was served so far."""
        return self._served.get(tenant, 0.0)

    def joins(self, entry: Entry) -> None:
        """A request of the tenant waits."""
        tenant = entry.request.tenant
        if tenant not in self._waiting:
            level = min((self.of(one) for one in self._waiting), default=self._level)
            self._served[tenant] = max(self.of(tenant), level)
            self._waiting[tenant] = 0
        self._waiting[tenant] += 1
        self._note(entry.slot, tenant)

    def leaves(self, entry: Entry) -> None:
        """One fewer of the tenant's requests waits; who is the last to wait sets the level."""
        tenant = entry.request.tenant
        self._waiting[tenant] -= 1
        if self._waiting[tenant] == 0:
            del self._waiting[tenant]
            self._level = self.of(tenant)

    def charge(self, entry: Entry) -> None:
        """It is sent: the tenant pays for the prompt (once) and the predicted output."""
        prompt = entry.request.prompt_tokens if entry.admissions == 0 else 0
        self._pay(entry, prompt, entry.predicted)

    def settle(self, entry: Entry) -> None:
        """It is back or over: the tenant pays for what came."""
        self._pay(entry, 0, float(entry.request.generated_tokens))

    def of_rows(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The service of the tenants of some rows."""
        tenants, which = np.unique(self._tenant_of_row[rows], return_inverse=True)
        return np.array([self.of(int(one)) for one in tenants])[which]

    def _pay(self, entry: Entry, prompt_tokens: int, output_tokens: float) -> None:
        tenant = entry.request.tenant
        more = SERVICE_OUTPUT_WEIGHT * (output_tokens - entry.charged)
        self._served[tenant] = self.of(tenant) + prompt_tokens + more
        entry.charged = output_tokens

    def _note(self, slot: int, tenant: int) -> None:
        if slot >= len(self._tenant_of_row):
            more = np.zeros(max(64, slot + 1), np.int64)
            self._tenant_of_row = np.concatenate([self._tenant_of_row, more])
        self._tenant_of_row[slot] = tenant
