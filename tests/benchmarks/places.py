"""Where checkpoints are kept in a benchmark: a folder of the measured disk, or SeaweedFS behind a link."""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import harness

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.servers import S3Server, running_seaweed
from tests.support.throttled_proxy import throttled_proxy

PLACES_HELP = "separated by commas: disk, SeaweedFS at so many Gbit/s (1), or without a link (free)"
_BUCKET = "cost"
_PATIENT = {"read_timeout": 300, "connect_timeout": 60}
"""A slow answer is a figure and no failure."""


@dataclass(frozen=True, slots=True)
class Place:
    """A root that holds checkpoints.

    Attributes
    ----------
    name
        For tables.
    root
        A folder, or an S3 URL.
    options
        For fsspec; empty for a folder.
    scratch
        A folder for files on their way.
    """

    name: str
    root: str
    options: Mapping[str, Any]
    scratch: Path

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of this machine."""
        return "://" not in self.root

    @property
    def filesystem(self) -> Any:
        """The fsspec filesystem."""
        return fsspec.filesystem("file" if self.is_local else "s3", **self.options)

    def new(self) -> str:
        """Return the URL of something that is not there yet."""
        return f"{self.root}/{uuid.uuid4().hex[:12]}"

    def sizes(self, url: str) -> dict[str, int]:
        """Return the bytes of each object under ``url``, by its path."""
        self.filesystem.invalidate_cache()
        return {path: item["size"] for path, item in self.filesystem.find(url, detail=True).items()}

    def size_bytes(self, url: str) -> int:
        """Return the bytes of all objects under ``url``."""
        return sum(self.sizes(url).values())

    def remove(self, url: str) -> None:
        """Remove everything under ``url``."""
        self.filesystem.invalidate_cache()
        if self.filesystem.exists(url):
            self.filesystem.rm(url, recursive=True)


def local_disk(folder: Path) -> Place:
    """Return the place in a folder."""
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    return Place("local disk", str(folder), {}, scratch)


def chosen_places(names: Iterable[str], folder: str) -> Iterator[Place]:
    """Yield each named place in turn, in a new folder below ``folder``; it ends, and is removed, ahead of the next one.

    Names are those of `PLACES_HELP`.
    """
    for name in names:
        with contextlib.ExitStack() as stack:
            here = Path(stack.enter_context(harness.data_folder(folder)))
            if name == "disk":
                yield local_disk(here)
            else:
                yield stack.enter_context(seaweed(here, None if name == "free" else float(name)))


@contextlib.contextmanager
def seaweed(folder: Path, gbit_per_s: float | None) -> Iterator[Place]:
    """Yield a place on a SeaweedFS of its own, whose data lies in ``folder``, behind a link as in `behind_link`."""
    data = folder / "seaweed"
    data.mkdir(exist_ok=True)
    with running_seaweed(data) as server:
        server.client().create_bucket(Bucket=_BUCKET)
        with behind_link(server, _BUCKET, folder, gbit_per_s) as place:
            yield place


@contextlib.contextmanager
def behind_link(server: S3Server, bucket: str, folder: Path, gbit_per_s: float | None) -> Iterator[Place]:
    """Yield a place in a bucket, behind a link of that rate in each direction (None: no link)."""
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    name = "SeaweedFS, unthrottled" if gbit_per_s is None else f"SeaweedFS, {gbit_per_s:g} Gbit/s"
    with contextlib.ExitStack() as stack:
        if gbit_per_s is not None:
            rate = gbit_per_s * 1e9 / 8
            link = stack.enter_context(throttled_proxy(int(server.endpoint_url.rpartition(":")[2]), rate, rate))
            server = S3Server(f"http://127.0.0.1:{link.port}", server.access_key, server.secret_key)
        options = {**server.storage_options, "use_listings_cache": False, "config_kwargs": dict(_PATIENT)}
        yield Place(name, f"s3://{bucket}/{uuid.uuid4().hex}", options, scratch)
