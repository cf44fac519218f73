"""Data that several runs need: read, and divided among clients, once for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from ..config.build import build_data, data_table, load_source
from ..config.schema import Config
from ..data import FederatedData, Source

Stamps = tuple[tuple[str, int, int] | None, ...]
MOST = 1 << 29  # bytes of a source that may wait for the next run


class DataCache:
    """Builds the data of runs of one command; they share what is the same, so nobody may write into
    it.

    Divided data are kept as long as a run has them. The last source is kept, too, unless it is
    large.
    """

    def __init__(self) -> None:
        self._source: tuple[str, Stamps, Source] | None = None
        self._data: WeakValueDictionary[str, FederatedData] = WeakValueDictionary()
        self._stamps: dict[str, Stamps] = {}

    def build_data(self, config: Config) -> FederatedData:
        """The clients' data; read again where a file has changed."""
        key = repr(sorted(data_table(config).items()))
        known = self._data.get(key)
        if known is None or self._stamps[key] != _stamps(known.info):
            known = self._data[key] = build_data(config, self._load)
            self._stamps[key] = _stamps(known.info)
        return known

    def _load(self, name: str, options: Mapping[str, Any]) -> Source:
        key = repr((name, sorted(options.items())))
        if (
            self._source is not None
            and self._source[0] == key
            and self._source[1] == _stamps(self._source[2].info)
        ):
            return self._source[2]
        self._source = None  # before the next one takes memory, too
        source = load_source(name, options)
        arrays = (source.x, source.y, source.x_test, source.y_test, source.x_server)
        if sum(array.nbytes for array in arrays if array is not None) <= MOST:
            self._source = (key, _stamps(source.info), source)
        return source


def _stamps(info: Mapping[str, Any]) -> Stamps:
    """Which files data were read from, and when those were last changed."""
    return tuple(
        _stamp(file)
        for file in (*info.get("files", ()), info.get("server_file"))
        if file is not None
    )


def _stamp(file: str) -> tuple[str, int, int] | None:
    try:
        facts = Path(file).stat()
    except OSError:
        return None
    return file, facts.st_mtime_ns, facts.st_size
