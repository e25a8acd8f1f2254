"""Compaction on a Ray cluster: `RayPool` is an engine of `cnr_store.compact` and `maintain`.

```python
from cnr_store import compact
from cnr_store.integrations.ray import RayPool

compact(store, engine=RayPool())
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cnr_store.errors import BadInput, CnrStoreError, MissingDependency

__all__ = ["RayPool"]


class RayPool:
    """Runs compaction tasks on a running Ray cluster, of the caller or this machine. A task has one thread.

    Raises
    ------
    MissingDependency
        Raised when a compaction starts: the package ray is not installed.
    BadInput
        No cluster is running here.
    """

    threads = 1

    def start(self, workers: int | None, tasks: int) -> int:  # noqa: ARG002 - Ray queues tasks
        """Connect and return how many tasks run at once: ``workers``, or the cluster's cores. Blocks."""
        self._ray = _connected_ray()
        return workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def submit(self, task: Callable[..., tuple[int, str]], *arguments: Any) -> Any:
        """Start a task on the cluster and return its reference."""
        return self._ray.remote(task).remote(*arguments)

    def wait(self, pending: set[Any]) -> tuple[list[tuple[int, str]], set[Any]]:
        """Block until one task is done.

        Raises
        ------
        CnrStoreError
            The error of the task, or the cluster lost it.
        """
        ray = self._ray
        try:
            finished, rest = ray.wait(list(pending), num_returns=1)
            return ray.get(finished), set(rest)
        except ray.exceptions.RayTaskError as error:
            raise getattr(error, "cause", error) from None  # the cluster logs the traceback
        except ray.exceptions.RayError as error:
            raise CnrStoreError(
                f"the Ray cluster lost a task of the compaction ({type(error).__name__}: out of memory, or a machine "
                "failed); run it again: finished tasks are kept"
            ) from error

    def stop(self, pending: set[Any]) -> None:
        """Wait for pending tasks, never more than run at once; the cluster keeps running. Blocks.

        They are not cancelled: Ray 2 aborts this process if a task ends in the moment in which it is cancelled. What
        they write is kept for the next run.
        """
        if pending:
            self._ray.wait(list(pending), num_returns=len(pending))


def _connected_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingDependency(
            'a compaction on Ray needs a package that is not installed; pip install "cnr-store[ray]"', found="ray"
        ) from error
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise BadInput(
                "no Ray cluster is running here: start one (ray start --head), or first connect with "
                "ray.init(address=...)",
                found="ray",
            ) from error
    return ray
