"""Cache of datasets that several runs share: read and partitioned once for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from ...config.build import build_data, data_table, load_source
from ...config.schema import Config
from ...data import Dataset, FederatedData

FileVersion = tuple[str, int, int]  # path, modification time in ns, size in bytes
FileVersions = tuple[FileVersion | None, ...]  # None for a file that is missing
MAX_BYTES = 1 << 29  # datasets above this size are not kept for the next run


class DataCache:
    """Builds the data of the runs of one command; runs with equal settings share one object.

    Shared data must not be modified. Partitioned data are kept as long as a run uses them (weak
    references). Of the datasets before partitioning, only the last one is kept, unless it is large.
    """

    def __init__(self) -> None:
        self._source: tuple[str, FileVersions, Dataset] | None = None
        self._data: WeakValueDictionary[str, FederatedData] = WeakValueDictionary()
        self._file_versions: dict[str, FileVersions] = {}

    def build_data(self, config: Config) -> FederatedData:
        """Returns the clients' data; they are read again if a file has changed."""
        key = repr(sorted(data_table(config).items()))
        data = self._data.get(key)
        if data is None or self._file_versions[key] != _file_versions(data.info):
            data = self._data[key] = build_data(config, self._load)
            self._file_versions[key] = _file_versions(data.info)
        return data

    def _load(self, name: str, options: Mapping[str, Any]) -> Dataset:
        key = repr((name, sorted(options.items())))
        if (
            self._source is not None
            and self._source[0] == key
            and self._source[1] == _file_versions(self._source[2].info)
        ):
            return self._source[2]
        self._source = None  # free the old dataset before the new one is loaded
        source = load_source(name, options)
        arrays = (source.x, source.y, source.x_test, source.y_test, source.x_server)
        if sum(array.nbytes for array in arrays if array is not None) <= MAX_BYTES:
            self._source = (key, _file_versions(source.info), source)
        return source


def _file_versions(info: Mapping[str, Any]) -> FileVersions:
    """Returns the files that data were read from, with modification times and sizes."""
    paths = (*info.get("files", ()), info.get("server_file"))
    return tuple(_file_version(path) for path in paths if path is not None)


def _file_version(path: str) -> FileVersion | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return path, status.st_mtime_ns, status.st_size
