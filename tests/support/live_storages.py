"""The memory that operators allocate, on devices whose allocator does not count it."""

from torch.multiprocessing.reductions import StorageWeakRef

from torchgpipe.planner.sandbox import strided, watching


class LiveStorages:
    """The storages that operators have made within a ``with`` block and that still live."""

    def __init__(self):
        self._made = {}
        #: The most bytes that lived at the same time.
        self.highest = 0
        self._mode = watching(self.add)

    def __enter__(self):
        self._mode.__enter__()
        return self

    def __exit__(self, *exception):
        self._mode.__exit__(*exception)

    def add(self, inputs, output):
        """Take note of the storages that an operator has made."""
        known = {StorageWeakRef(x.untyped_storage()) for x in strided(inputs)}
        for x in strided(output):
            reference = StorageWeakRef(x.untyped_storage())
            if reference not in known:
                self._made[reference] = x.untyped_storage().nbytes()
        self.highest = max(self.highest, sum(self.sizes()))

    def sizes(self):
        """The bytes of each storage that still lives."""
        # A step makes thousands, which would be asked again after each operator.
        self._made = {key: size for key, size in self._made.items() if not key.expired()}
        return [*self._made.values()]
