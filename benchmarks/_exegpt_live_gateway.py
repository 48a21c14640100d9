"""The same requests through a gateway in mode rra before an engine with its own scheduler."""

from __future__ import annotations

import math
from typing import Any

import _exegpt_live_load as load
import numpy as np

from lengthwise import Workload
from lengthwise.gateway.config import Dispatch, Engine, Forecasting, GatewayConfig, Listen, Order, Phases
from lengthwise.gateway.protocols import Listener
from lengthwise.gateway.request import Outcome, Request
from lengthwise.gateway.scheduling import Phase
from lengthwise.gateway.serve import Gateway
from lengthwise.schedule import Controls


class Monitor(Listener):
    """What a gateway tells: its phases, and of requests how long they were at the engine."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.at_engine: list[tuple[float, float, int]] = []
        self._sent: dict[int, float] = {}

    def dispatched(self, request: Request, worker: str, now_s: float) -> None:
        del worker
        self._sent[id(request)] = now_s

    def finished(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:
        del outcome, detail
        self.at_engine.append((self._sent.pop(id(request)), now_s, request.generated_tokens))

    def phase(self, phase: Phase) -> None:
        self.phases.append(phase)


async def run(
    url: str, model: str, made: Workload, tag: str, controls: Controls, concurrency: int, max_num_seqs: int
) -> dict[str, Any]:
    """What a gateway of its own made of them; some requests always wait there."""
    config = GatewayConfig(
        engines=(Engine(url, in_flight=max_num_seqs, generation_defaults="none"),),
        order=Order("rra", max_wait_s=math.inf),
        dispatch=Dispatch(phases=Phases(controls.encode_batch, controls.decode_steps)),
        prediction=Forecasting(predictor="none"),
        listen=Listen(port=0, admin_port=None),
    )
    watch = Monitor()
    async with Gateway(config) as gateway:
        assert await gateway.fleet.stable(60.0)
        gateway.driver.listeners.add(watch)
        await load.sent(f"http://127.0.0.1:{gateway.port}", model, made, tag, concurrency, stream=True)
        await gateway.drain()
    return seen(watch, controls)


def seen(monitor: Monitor, controls: Controls) -> dict[str, Any]:
    """As ``_exegpt_live_load.seen``, by what the gateway tells."""
    full = [k for k, one in enumerate(monitor.phases) if one.encode_batch == controls.encode_batch]
    window = monitor.phases[full[0] + load.ramp(controls) : full[-1]]
    assert len(window) > 5 + load.ramp(controls), f"{len(window)} phases of {len(monitor.phases)} are in the window"
    started_s, finished_s = window[0].started_s, window[-1].started_s
    last_s = window[-load.ramp(controls)].started_s  # later ones end when nobody is encoded any more
    long = [
        to_s - from_s
        for from_s, to_s, tokens in monitor.at_engine
        if started_s <= from_s < last_s and tokens == load.longest()
    ]
    assert long, "no request of the longest output is in the window"
    steps = [one.decode_steps for one in window]
    return {
        "throughput_rps": sum(one.encode_batch for one in window[:-1]) / (finished_s - started_s),
        "latency_s": float(np.mean(long)),
        "decode_batch": float(np.mean([one.decode_batch for one in window])),
        "cycle_s": float(np.diff([one.started_s for one in window]).mean()),
        "decode_steps": float(np.mean(steps)),
        "encode_batch": float(np.mean([one.encode_batch for one in window])),
        "ended_by_steps": float(np.mean([one.cause == "steps" for one in window])),
        "phases": len(window),
        "longest": len(long),
    }
