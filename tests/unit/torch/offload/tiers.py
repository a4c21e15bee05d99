"""Tiers for tests: one that copies when it is told to, and a GPU's streams played out on the host."""

import torch


class ByHand:
    """A tier whose copies are made one by one, in order, when `run` is called or somebody waits."""

    def __init__(self):
        self.log = []
        self.taken = 0
        self._queue = []

    def write(self, memory):
        place = {}
        self.taken += 1

        def copy():
            place["content"] = memory.clone()
            self.log.append(("write", memory.nbytes))

        return place, self._begin(copy)

    def read(self, place, memory):
        def copy():
            memory.copy_(place["content"])
            self.log.append(("read", memory.nbytes))

        return self._begin(copy)

    def free(self, place):
        self.taken -= 1
        place.clear()

    def close(self):
        pass

    def run(self, copies=10**9):
        while self._queue and copies:
            self._queue.pop(0).run()
            copies -= 1

    @property
    def waiting(self):
        return len(self._queue)

    def _begin(self, copy):
        made = _Copy(self, copy)
        self._queue.append(made)
        return made


class _Copy:
    def __init__(self, tier, copy):
        self._tier = tier
        self._copy = copy
        self.is_done = False
        self._is_skipped = False

    def run(self):
        if not self._is_skipped:
            self._copy()
        self._copy = None
        self.is_done = True

    def wait(self):
        while not self.is_done:
            self._tier.run(1)

    def skip(self):
        self._is_skipped = True
        return not self.is_done

    def seconds(self):
        return 0.0, 0.0


class Cuda:
    """What `torch.cuda` is to a `PinnedTier`: streams whose work runs only when `run` is called."""

    def __init__(self, *, copies_first):
        self.copies_first = copies_first
        self.compute = _Stream(self)
        self.streams = [self.compute]
        self._now = self.compute

    def Stream(self, device):
        self.streams.append(_Stream(self))
        return self.streams[-1]

    def Event(self, *, enable_timing):
        return _Event(self)

    def current_stream(self):
        return self._now

    def stream(self, stream):
        return _On(self, stream)

    def run(self):
        """Runs all work of all streams, as far as events let it."""
        order = self.streams[::-1] if self.copies_first else self.streams
        moved = True
        while moved:
            moved = False
            for stream in order:
                while stream.work and stream.work[0]():
                    stream.work.pop(0)
                    moved = True
        assert not any(stream.work for stream in self.streams), "streams wait for one another"


class _On:
    def __init__(self, cuda, stream):
        self._cuda, self._stream = cuda, stream

    def __enter__(self):
        self._before, self._cuda._now = self._cuda._now, self._stream

    def __exit__(self, *exc_info):
        self._cuda._now = self._before


class _Stream:
    def __init__(self, cuda):
        self._cuda = cuda
        self.work = []

    def do(self, function):
        def run():
            function()
            return True

        self.work.append(run)

    def wait_event(self, event):
        self.work.append(lambda: event.come)

    def wait_stream(self, other):
        event = _Event(self._cuda)
        event.record(other)
        self.wait_event(event)

    def synchronize(self):
        self._cuda.run()


class _Event:
    def __init__(self, cuda):
        self._cuda = cuda
        self.come = False

    def record(self, stream=None):
        def come():
            self.come = True

        (stream or self._cuda.current_stream()).do(come)

    def query(self):
        return self.come

    def synchronize(self):
        self._cuda.run()

    def elapsed_time(self, other):
        return 0.0


def delayed_copies(cuda, monkeypatch):
    """Has `copy_` with ``non_blocking`` put the copy on the current stream of `cuda`."""
    plain = torch.Tensor.copy_

    def copy_(self, source, non_blocking=False):
        if not non_blocking:
            return plain(self, source)
        cuda.current_stream().do(lambda: plain(self, source))
        return self

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
