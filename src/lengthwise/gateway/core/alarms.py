"""Times at which something is due for a request, however many are called off."""

from __future__ import annotations

import heapq


class Alarms:
    """One time a request; setting, clearing and asking for the next take O(log n), memory is O(set)."""

    def __init__(self) -> None:
        self._at: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._at)

    def set(self, request_id: int, at_s: float) -> None:
        """Rings at this time; inf never."""
        if at_s == float("inf"):
            self._at.pop(request_id, None)
            return
        self._at[request_id] = at_s
        heapq.heappush(self._heap, (at_s, request_id))
        if len(self._heap) > 2 * len(self._at) + 64:
            self._heap = [(at, one) for one, at in self._at.items()]
            heapq.heapify(self._heap)

    def clear(self, request_id: int) -> None:
        """Does not ring."""
        self._at.pop(request_id, None)

    def next_s(self) -> float:
        """When the first rings; inf none is set."""
        heap = self._heap
        while heap and self._at.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else float("inf")

    def rung(self, now_s: float) -> list[int]:
        """Those whose time has come, in its order; they are cleared."""
        ids = []
        while self.next_s() <= now_s:
            _, request_id = heapq.heappop(self._heap)
            del self._at[request_id]
            ids.append(request_id)
        return ids
