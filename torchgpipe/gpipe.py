"""The wrapper, which makes an :class:`nn.Sequential` train over several devices."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.batchnorm import defer
from torchgpipe.checks import checked_flag
from torchgpipe.devices.streams import Device
from torchgpipe.engine.pipeline import Pipeline
from torchgpipe.engine.stages import Stages
from torchgpipe.engine.wrapper import MiniBatch, Wrapper, begin_mini_batch, moving_denied
from torchgpipe.partition.arguments import MISSING, checked_balance, checked_devices, checked_index
from torchgpipe.partition.keeping import Keeping
from torchgpipe.partition.placement import place, verify_placement, verify_sharding
from torchgpipe.partition.split import own_key, plain_module, rename, split_module, verify_module
from torchgpipe.planner.auto import chosen
from torchgpipe.show.describe import Description
from torchgpipe.skip.skippable import verify_skippables
from torchgpipe.values.structure import arguments

__all__ = ["GPipe"]


class GPipe(Wrapper):
    """Train an :class:`nn.Sequential` by pipeline parallelism (:doc:`gpipe`).

    ::

        model = GPipe(nn.Sequential(a, b, c, d), balance=[2, 2], chunks=8)
        output = model(input.to(model.devices[0]))
        F.cross_entropy(output, target.to(model.devices[-1])).backward()

    Args:
        module: the layers. They are moved to the devices, not copied.
        balance: how many layers each partition takes; or ``"auto"``, the fastest balance that fits,
            with the best chunks and checkpoint unless they are given (:doc:`choose`).
        devices: a device for each partition; by default all accelerators, or else the CPU.
        chunks: how many micro-batches to make of a mini-batch; by default 1.
        checkpoint: what backward computes again: ``'always'`` all micro-batches, ``'except_last'``
            (the default) all but the last, ``'never'`` none, nor ``'offload'``, which keeps them in
            the host's memory; a policy; or a list, one for each partition (:doc:`checkpointing`).
        deferred_batch_norm: whether batch norms update running statistics once per mini-batch, and
            not, as by default, once per micro-batch (:doc:`batchnorm`).
        sample: for ``"auto"``: an input, a tuple, or a dict, with the rows of a mini-batch.

    ``chunks`` and ``checkpoint`` may be changed between steps. Errors say what to pass instead.
    """

    _own = (*Wrapper._own, "_stages", "_plain")
    #: Whether batch norms update running statistics once per mini-batch, not per micro-batch.
    deferred_batch_norm: bool
    #: For each partition, an :class:`nn.Sequential` of its layers.
    partitions: nn.ModuleList

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | str | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = MISSING,
        checkpoint: Keeping | Sequence[Keeping] = MISSING,
        deferred_batch_norm: bool = False,
        sample: Any = None,
    ) -> None:
        super().__init__()
        verify_module(module)
        verify_skippables(module)
        # The type is Any: the mode may be wrong until chosen() and _set() have checked it.
        mode: Any = checkpoint
        sizes, places, chunks, mode, predicted = chosen(
            module, balance, sample, devices, chunks, mode, GPipe
        )
        self._balance = checked_balance(sizes, module)
        self._devices = checked_devices(places, len(self._balance))
        verify_sharding(module, self._devices)
        self._set(module, chunks, mode)
        partitions = split_module(module, self._balance)
        place(partitions, self._devices)
        self.partitions = nn.ModuleList(partitions)
        self.deferred_batch_norm = checked_flag(deferred_batch_norm, "deferred_batch_norm")
        if deferred_batch_norm:
            defer(self.partitions)
        self.partitions.training = module.training
        self._wrapped("GPipe")
        if predicted is not None:
            self._stages.predict(*predicted, self, None)

    def _prepare(self) -> None:
        super()._prepare()
        self._stages = Stages(self._layers, self._devices)
        # ``self._plain = ...`` would register the module, which has the layers a second time.
        self.__dict__["_plain"] = nn.Sequential()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_traps" not in state:
            raise TypeError(
                "a whole GPipe that torchgpipe 0.0.7 pickled cannot be loaded, since the pickle "
                f"holds inner objects of 0.0.7 (balance: {state.get('balance')}); load it with "
                "0.0.7, save its state_dict(), and load that into a new GPipe"
            )
        super().__setstate__(state)

    def _traced(self) -> tuple[Stages, list[torch.device]]:
        return self._stages, self.devices

    @property
    def balance(self) -> list[int]:
        """The number of layers in each partition. To change it, wrap ``model.module`` anew."""
        # A plain list, since torch.load(weights_only=True) must read it if users save it. A copy,
        # since users may change it.
        return [*self._balance]

    @balance.setter
    def balance(self, balance: object) -> NoReturn:
        raise _read_only("balance", balance)

    @property
    def devices(self) -> list[torch.device]:
        """The device of each partition. Inputs go to the first, outputs come from the last."""
        return [*self._devices]

    @devices.setter
    def devices(self, devices: object) -> NoReturn:
        raise _read_only("devices", devices)

    @property
    def _partition_count(self) -> int:
        return len(self._balance)

    @property
    def _layers(self) -> Any:
        return self.partitions

    @property
    def _entrance(self) -> tuple[torch.device, str, str]:
        return self._devices[0], "partition", "model.devices[0]"

    def _verify(self) -> None:
        verify_sharding(self, self._devices)
        verify_placement(self._layers, self._devices, self._stages.lent)

    @property
    def module(self) -> nn.Sequential:
        """The plain :class:`nn.Sequential` of the same layers, with the keys that it had."""
        layers = {k: x for part in self.partitions for k, x in part._modules.items()}
        plain: nn.Sequential = self.__dict__["_plain"]
        if plain._modules != layers:
            plain = self.__dict__["_plain"] = plain_module(layers)
            plain.training = self.training
        return plain

    @property
    def hf_device_map(self) -> dict[str, torch.device]:
        """The device of each layer: Accelerate and Trainers do not move what has this attribute."""
        return {
            f"partitions.{j}.{name}": device
            for j, (layers, device) in enumerate(zip(self.partitions, self._devices))
            for name in layers._modules
        }

    def describe(self) -> Description:
        """Describe the partitions in a table: sizes, modes; after a trace, times and memory."""
        return self._stages.describe(self)

    def train(self, mode: bool = True) -> GPipe:
        """Switch training mode on or off, as :meth:`nn.Module.train` does."""
        super().train(mode)
        self.__dict__["_plain"].training = mode
        return self

    def __len__(self) -> int:
        """The number of layers."""
        return len(self.module)

    def __getitem__(self, index: int) -> nn.Module:
        """A layer by its index in the plain module; a negative index counts from the end."""
        return self.module[checked_index(index)]

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers, in order."""
        return iter(self.module)

    def cuda(self, device: Device | None = None) -> NoReturn:
        """Always raises :exc:`TypeError`: each partition stays on its device."""
        raise moving_denied()

    def cpu(self) -> NoReturn:
        """Always raises :exc:`TypeError`: each partition stays on its device."""
        raise moving_denied()

    def to(self, *args: Any, **kwargs: Any) -> GPipe:
        """Change dtype or memory format; a device is a :exc:`TypeError`."""
        first = args[0] if args else kwargs.get("device", kwargs.get("tensor"))
        if isinstance(first, torch.device | str | int | Tensor):
            raise moving_denied()
        return super().to(*args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # Renamed here, not in load_state_dict(), which a parent does not call for its submodules.
        rename(state_dict, prefix, self._prefixes)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict with the keys of the plain module, or of a wrapper with any balance."""
        versions = getattr(state_dict, "_metadata", None)
        if versions is not None:
            # _metadata, which mypy does not know, has a version for each key of a layer. These keys
            # are renamed, too. If a parent module loads the wrapper, this method is not called, and
            # layers whose keys differ find no version.
            state_dict = OrderedDict(state_dict)
            prefixes = self._prefixes
            state_dict._metadata = {  # type: ignore[attr-defined]
                own_key(key, prefixes): version for key, version in versions.items()
            }
        return super().load_state_dict(state_dict, *args, **kwargs)

    @property
    def _prefixes(self) -> dict[str, str]:
        """The start of the state dict's keys of each layer, up to its name."""
        return {
            name: f"partitions.{j}."
            for j, layers in enumerate(self.partitions)
            for name in layers._modules
        }

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layers, micro-batch by micro-batch (:doc:`inputs`).

        Tensors come on ``devices[0]``, and are split along dimension 0; outputs are joined, on
        ``devices[-1]``. What has no dimension comes out once per micro-batch, of shape ``(m,)``.
        """
        if not self._devices:
            return self.module(*args, **kwargs)
        mini_batch = MiniBatch(self, arguments(args, kwargs))
        begin_mini_batch(self)
        pipeline = Pipeline(self._stages, mini_batch.batches, mini_batch.modes)
        mini_batch.compute(pipeline.run)
        return mini_batch.joined(pipeline.step.blocks)


def _read_only(name: str, value: object) -> AttributeError:
    return AttributeError(
        f"{name} is decided when a module is wrapped, so it cannot be set later ({name}: "
        f"{value!r}); wrap the same layers anew, as GPipe(model.module, ..., {name}=...)"
    )
