"""From the tables of a gateway's file to its config: keys read, files found, names known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lengthwise.gateway import config as told
from lengthwise.gateway.ports import check_ports
from lengthwise.scenario._gateway_keys import WrongKeyError, client_keys, engine_key
from lengthwise.scenario._gateway_places import (
    check_address,
    check_collector,
    check_journal,
    check_proxies,
)
from lengthwise.scenario._gateway_sections import (
    DiscoverySection,
    DispatchSection,
    EngineSection,
    FoundSection,
    GatewayFile,
    ListenSection,
    OrderSection,
    TlsSection,
)
from lengthwise.scenario._places import resolved
from lengthwise.scenario._problems import Problem
from lengthwise.schema.errors import InputError

_SHIPPED = ("default", "none")
_ANY = told.Discovery().engine.url
"""Of an engine that is not listed; it is not used."""


class _Maker:
    """Makes the parts, and notes what is wrong with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[Problem] = []

    @contextmanager
    def at(self, *path: str) -> Iterator[None]:
        """Whatever cannot be made within is a problem of that table."""
        try:
            yield
        except WrongKeyError as wrong:
            self.problems.append(Problem((*path, wrong.name) if wrong.name else path, wrong.text))
        except InputError as error:
            self.problems.append(Problem(path, str(error)))

    def file(self, text: str, *path: str) -> str:
        """A file that must be there."""
        found = resolved(text, self.folder)
        if not found.is_file():
            self.problems.append(Problem(path, f"there is no file {found}"))
        return str(found)

    def tls(self, section: TlsSection | None, *path: str) -> told.Tls | None:
        """Certificates whose files are there."""
        if section is None:
            return None
        if (section.cert is None) is not (section.key is None):
            self.problems.append(Problem((*path, "tls"), "cert and key belong together; give both or none"))
        files = section.model_dump(exclude_none=True)
        return told.Tls(**{name: self.file(text, *path, "tls", name) for name, text in files.items()})

    def engine(self, section: FoundSection, *path: str) -> told.Engine:
        """An engine, its key read."""
        with self.at(*path):
            return told.Engine(
                url=_address(section) if isinstance(section, EngineSection) else _ANY,
                name=section.name if isinstance(section, EngineSection) else "",
                kind=section.kind,
                api_key=engine_key(section, self.folder),
                in_flight=section.in_flight,
                tls=self.tls(section.tls, *path),
                probe=section.probe,
                generation_defaults=section.generation_defaults,
            )
        return told.Engine(_ANY, name=".".join(path))  # its problem is told; its name is nobody else's

    def discovery(self, section: DiscoverySection) -> told.Discovery:
        """Where engines are found."""
        with self.at("discovery", "api_url"):
            if section.api_url is not None:
                check_address(section.api_url, "the address of the Kubernetes API")
        return told.Discovery(
            dns=section.dns,
            endpoint_slices=section.endpoint_slices,
            every_s=section.every_s,
            api_url=section.api_url,
            engine=self.engine(section.engine, "discovery", "engine"),
        )

    def order(self, section: OrderSection) -> told.Order:
        """The order, its policies known."""
        from lengthwise.policy import resolve

        for axis in ("rank", "takeover"):
            name = getattr(section, axis)
            with self.at("order", axis):
                if name is not None:
                    resolve(axis, name)
        return told.Order(**section.model_dump())

    def dispatch(self, section: DispatchSection) -> told.Dispatch:
        """How engines are given requests, with the phases that they keep."""
        phases, plain = None, section.model_dump(exclude={"phases"})
        if section.phases is not None:
            with self.at("dispatch", "phases"):
                phases = told.Phases(**section.phases.model_dump())
        with self.at("dispatch"):
            return told.Dispatch(**plain, phases=phases)
        return told.Dispatch()

    def listen(self, section: ListenSection) -> told.Listen:
        """The ports; the journal starts at the file's folder as all files do."""
        plain = section.model_dump(exclude={"tls", "admin_port", "journal"})
        tls = self.tls(section.tls, "listen")
        if tls is not None and tls.cert is None:
            self.problems.append(Problem(("listen", "tls"), "a server needs cert and key"))
        if section.admin_port == section.port and section.port and section.admin_host == section.host:
            self.problems.append(Problem(("listen", "admin_port"), "must differ from port"))
        journal = None if section.journal is None else self.folder / Path(section.journal).expanduser()
        with self.at("listen", "journal"):
            if journal is not None:
                check_journal(journal)
        with self.at("listen", "proxies"):
            if section.proxies is not None:
                check_proxies(section.proxies)
        with self.at("listen", "trace"):
            if section.trace is not None:
                check_collector(section.trace)
        return told.Listen(
            **plain,
            admin_port=None if section.admin_port == "none" else section.admin_port,
            tls=tls,
            journal=None if journal is None else str(journal),
        )

    def forecasting(self, file: GatewayFile) -> told.Forecasting:
        """The predictor, its file there."""
        plain = file.forecasting.model_dump()
        if plain["predictor"] not in _SHIPPED:
            plain["predictor"] = self.file(plain["predictor"], "forecasting", "predictor")
        return told.Forecasting(**plain)

    def keys(self, file: GatewayFile) -> tuple[told.Key, ...]:
        """All clients' keys; no key has two holders."""
        made: dict[str, told.Key] = {}
        for number, section in enumerate(file.keys):
            with self.at("keys", str(number)):
                for key in client_keys(section, self.folder):
                    if key.sha256 in made:
                        both = f"{made[key.sha256].tenant} and {key.tenant}"
                        raise InputError(f"one key is given twice, to {both}; give each its own")
                    made[key.sha256] = key
        return tuple(made.values())


def _names(engines: tuple[told.Engine, ...]) -> Iterator[Problem]:
    """Engines that share a name, given or of their address."""
    seen: set[str] = set()
    for number, engine in enumerate(engines):
        name = engine.name or urlsplit(engine.url).netloc.rpartition("@")[2]
        if name in seen:
            text = f"every engine must have a name of its own; {name!r} is there twice: set its name"
            yield Problem(("engines", str(number)), text)
        seen.add(name)


def config_of(file: GatewayFile, folder: Path) -> tuple[told.GatewayConfig | None, list[Problem]]:
    """What a gateway is told, or what is wrong with it.

    Args:
        file: Its tables, each value in its bounds.
        folder: Where relative paths start.
    """
    maker = _Maker(folder)
    parts: dict[str, Any] = {
        "engines": tuple(maker.engine(one, "engines", str(at)) for at, one in enumerate(file.engines)),
        "discovery": maker.discovery(file.discovery),
        "order": maker.order(file.order),
        "forecasting": maker.forecasting(file),
        "keys": maker.keys(file),
        "listen": maker.listen(file.listen),
    }
    parts["dispatch"] = maker.dispatch(file.dispatch)
    for name, kind in (("admission", told.Admission), ("limits", told.Limits), ("care", told.Care)):
        with maker.at(name):
            parts[name] = kind(**getattr(file, name).model_dump())
    maker.problems += _names(parts["engines"])
    if maker.problems:
        return None, maker.problems
    config = None
    with maker.at():
        config = told.GatewayConfig(**parts)
    if config is not None:
        with maker.at("engines"):
            check_ports(config)
    return config, maker.problems


def _address(section: EngineSection) -> str:
    check_address(section.url, "the address of a server")
    return section.url
