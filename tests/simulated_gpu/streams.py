"""Streams whose kernels run late: when the host, or a stream that runs, waits for them.

`Device` is the GPU of one thread: every thread counts as a process with a GPU of its own.
"""

import contextlib
import linecache
import sys
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.simulated_gpu.memory import device_memory

CUDA = torch.device("cuda", 0)
_OWN = tuple(
    str(Path(__file__).with_name(f"{name}.py")) for name in ("memory", "streams", "operators", "gpu")
)
_ROOTS = ("site-packages/", f"{Path(__file__).resolve().parents[2]}/")


class RaceError(RuntimeError):
    """Memory was freed before a copy of the host, or a kernel of a stream that did not allocate it, had run."""


class Order(Enum):
    """Says which streams run their kernels at once; those of the others run when they are waited for.

    Streams that do not wait for each other may run in any order on a GPU. A race shows in some orders only.
    """

    LATE = "no stream runs at once"
    SIDE_FIRST = "all streams but the default one run at once"
    DEFAULT_FIRST = "the default stream runs at once"
    AT_ONCE = "all streams run at once: without races, as a CPU"

    def runs(self, stream: "Stream") -> bool:
        """Return whether a kernel of this stream runs as soon as it is queued."""
        at_once = Order.DEFAULT_FIRST if stream is here().default else Order.SIDE_FIRST
        return self in (Order.AT_ONCE, at_once)


class Wait(NamedTuple):
    """Says where the host waited for the device, by the innermost line outside of torch and the simulation."""

    path: str
    line: int
    why: str

    @property
    def file(self) -> str:
        """The path from the package's folder on."""
        return next((self.path.partition(root)[2] for root in _ROOTS if root in self.path), self.path)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.why}): {linecache.getline(self.path, self.line).strip()}"


class Kernel:
    """Holds a piece of work that is queued.

    Args:
        name: names it in errors.
        work: is called without arguments.
        memory: the device tensors that it reads or writes, and what it copies of memory that the program pinned:
            aliases that nothing else refers to.
    """

    __slots__ = ("memory", "place", "work")

    def __init__(self, name: str, work: Callable[[], object], memory: Sequence[Tensor] = ()) -> None:
        self.work, self.memory = work, memory
        self.place = place_of(name) if memory else None
        for tensor in memory:
            here().pending[tensor.untyped_storage()._cdata] += 1

    def run(self, stream: "Stream") -> None:
        """Do the work. Raises RaceError for memory that CUDA's allocator could have given away meanwhile.

        A stream gets memory that was freed again at once. That is safe where it waits for this kernel first.
        """
        with outside_modes():
            for tensor in self.memory:
                self._check(tensor, stream)
            self.work()
            for tensor in self.memory:
                here().pending[tensor.untyped_storage()._cdata] -= 1
        self.memory = ()

    def _check(self, tensor: Tensor, stream: "Stream") -> None:
        storage, device, owner = tensor.untyped_storage()._cdata, here(), device_memory.get(tensor)
        if owner is not None and (
            owner is stream or (storage, stream) in device.recorded or owner.waits_for(stream, stream.done)
        ):
            return
        others = torch._C._storage_Use_Count(storage) - 1 - device.pending[storage]  # 1: its Python object
        if others <= 0:
            whose = "of another stream" if owner else "of the host"
            raise RaceError(f"memory {whose} was freed before this had run: {self.place}")


class Stream:
    """Runs kernels in the order in which they were queued. Has the interface of `torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.priority = CUDA, priority
        self.queued = self.done = 0
        self._queue: deque[Kernel] = deque()
        self._awaited: list[tuple[Stream, int]] = []  # streams, and until which of their kernels
        here().streams.append(self)
        self.stream_id = self.cuda_stream = len(here().streams)

    def put(self, kernel: Kernel) -> None:
        """Queue a kernel."""
        self._queue.append(kernel)
        self.queued += 1
        if here().order.runs(self):
            self.run()

    def run(self, until: int | None = None) -> None:
        """Run the kernels that are queued, or the first `until` of all that ever were."""
        until = self.queued if until is None else until
        while self.done < until:
            self.done += 1
            self._queue.popleft().run(self)

    def synchronize(self) -> None:
        here().wait("synchronize", self)

    def query(self) -> bool:
        return self.done == self.queued

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        if event.place is not None:  # as it was recorded last
            self._awaited.append(event.place)
            self.put(Kernel("wait", partial(self._reach, *event.place)))

    def waits_for(self, stream: "Stream", number: int) -> bool:
        """Return whether it has yet to wait for the first `number` kernels of another stream."""
        return any(other is stream and number <= until for other, until in self._awaited)

    def _reach(self, stream: "Stream", number: int) -> None:
        stream.run(number)
        self._awaited.remove((stream, number))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())


class Event:
    """Marks a place in a stream. Has the interface of `torch.cuda.Event`.

    Attributes:
        place: the stream, and how many kernels it had when the event was recorded; None: it was not.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self.place: tuple[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or here().current
        self.place = stream, stream.queued

    def synchronize(self) -> None:
        here().count("event")
        if self.place is not None:
            stream, number = self.place
            stream.run(number)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or here().current).wait_event(self)

    def query(self) -> bool:
        return self.place is None or self.place[0].done >= self.place[1]

    def elapsed_time(self, other: "Event") -> float:
        """Return 0.0 milliseconds: the device has no clock."""
        return 0.0


class Device:
    """Holds the streams of one thread's GPU.

    Attributes:
        order: which streams run at once.
        waits: how often the host waited for the device, by place and reason.
        crossed: bytes that were copied, by the side to which: "host", "device".
        pending: how many tensors of kernels that have not run lie in a storage, by its address.
        recorded: (address of a storage, stream) for each call of `Tensor.record_stream`.
        sync_debug_mode: of `torch.cuda.set_sync_debug_mode`, "warn" or "default".
    """

    sync_debug_mode = "default"

    def __init__(self, order: Order) -> None:
        self.order = order
        self.waits: Counter[Wait] = Counter()
        self.crossed: Counter[str] = Counter()
        self.pending: Counter[int] = Counter()
        self.recorded: set[tuple[int, Stream]] = set()
        self.streams: list[Stream] = []

    def start(self) -> None:
        """Make the default stream; `here` is this device now."""
        self.default = self.current = Stream()

    def count(self, why: str) -> None:
        """Count a wait of the host."""
        self.waits[place_of(why)] += 1
        if self.sync_debug_mode == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    def wait(self, why: str, stream: Stream | None = None) -> None:
        """Count a wait of the host for a stream, the current one by default, and run it."""
        self.count(why)
        (stream or self.current).run()

    def synchronize(self) -> None:
        """Wait for all streams."""
        self.count("synchronize device")
        for stream in self.streams:
            stream.run()

    @contextlib.contextmanager
    def use(self, stream: Stream | None) -> Iterator[None]:
        """Make a stream the current one inside."""
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before


_thread = threading.local()


def here() -> Device:
    """Return the device of this thread. A thread without one gets a device that runs all at once."""
    if getattr(_thread, "device", None) is None:
        set_here(Device(Order.AT_ONCE))
        _thread.device.start()
    device: Device = _thread.device
    return device


def set_here(device: Device | None) -> None:
    """Give this thread a device, or take it away (None)."""
    _thread.device = device


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Call torch inside as if there were no simulation, and no autograd."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def place_of(why: str) -> Wait:
    """Return the innermost line outside of torch and the simulation."""
    frame = sys._getframe(2)
    while True:
        path = frame.f_code.co_filename
        if not (path.startswith((*_OWN, "<")) or "/torch/" in path or path.endswith("/contextlib.py")):
            return Wait(path, frame.f_lineno, why)
        if frame.f_back is None:
            return Wait("?", 0, why)
        frame = frame.f_back
