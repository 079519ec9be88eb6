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
    """Train an :class:`nn.Sequential` by pipeline parallelism.

    ::

        model = GPipe(nn.Sequential(a, b, c, d), balance=[2, 2], chunks=8)
        output = model(input.to(model.devices[0]))
        F.cross_entropy(output, target.to(model.devices[-1])).backward()

    The layers are split into partitions, each on a device, and every mini-batch is split into
    micro-batches, which flow through the partitions one after the other. Checkpointing computes
    each micro-batch again in backward instead of keeping its activations.

    Args:
        module: the layers. They are moved to the devices, not copied.
        balance: how many layers each partition takes, in order. ``"auto"`` measures the layers with
            the sample, and takes the fastest balance that fits into the memory of the devices.
            Unless they are given, ``chunks`` and ``checkpoint`` are chosen, too. Not chosen are the
            devices, each of which gets a partition, and the schedule. It is
            ``torchgpipe.plan(module, sample, devices=devices).best``, for AdamW and nine tenths of
            each device's memory: see :func:`torchgpipe.plan` for other optimizers and limits.

    Keyword Args:
        devices: a device for each partition; further devices are not used. By default all
            accelerators, and the CPU for all partitions if there are none. ``"auto"`` needs
            accelerators, or devices, and uses each of them.
        chunks: how many micro-batches to make of a mini-batch; a mini-batch with fewer rows is
            split into its rows. The number may be changed between steps. The default is 1.
        checkpoint: which micro-batches are checkpointed: ``'always'``, ``'except_last'`` (all but
            the last) or ``'never'``; or ``'offload'``, which computes none again, but keeps what
            they save in the memory of the host (see :class:`~torchgpipe.Offload`); or a policy,
            ``partial(create_selective_checkpoint_contexts, policy)``, that names what is not
            computed again; or a list with one of these for each partition. Without grad cells keep
            nothing. It may be changed between steps. The default is ``'except_last'``.
        deferred_batch_norm: whether batch normalisations update their running statistics once
            per mini-batch, instead of once per micro-batch: see :mod:`torchgpipe.batchnorm`. Layers
            that are deferred already do so either way.
        sample: for ``"auto"`` only: the arguments of a call, with as many rows as a mini-batch. A
            mapping has keyword arguments, a tuple has positional ones, and a tensor is the only
            one. The layers compute it in copies; they do not change.

    Raises:
        TypeError: the module is not an :class:`nn.Sequential`, or has more than its layers; skips
            are not stashed and popped in pairs; a layer yields and is not skippable; devices is
            not a sequence; a batch normalisation cannot be deferred; or ``"auto"`` has no sample,
            or one of another kind.
        ValueError: balance, chunks or checkpoint are out of range, a buffer would be needed on
            two devices, or layers are sharded by FSDP2 while the devices are several. The balance
            is a word other than ``"auto"``, or it is, and devices are empty, the layers take no
            time there, or they do not fit. A sample is given beside a balance.
        IndexError: there are fewer devices than partitions.

    Source: Huang et al., GPipe (arXiv 1811.06965); Kim et al., torchgpipe (arXiv 2004.09910).
    """

    _own = (*Wrapper._own, "_stages", "_plain")
    #: Whether batch normalisations are deferred.
    deferred_batch_norm: bool
    #: The layers, as an :class:`nn.ModuleList` of :class:`nn.Sequential`.
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
        # A plan refuses modes that it does not choose among.
        mode: Any = checkpoint
        own, places, chunks, mode, predicted = chosen(
            module, balance, sample, devices, chunks, mode, GPipe
        )
        self._balance = checked_balance(own, module)
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
        # Setting an attribute would register the layers a second time.
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
        # A plain list, which torch.load takes anywhere, and a new one, since users may change it.
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
        """The plain :class:`nn.Sequential` of the same layers, as it was before wrapping.

        ``module.state_dict()`` has the keys of the model that was wrapped, whatever the balance.
        """
        layers = {k: x for part in self.partitions for k, x in part._modules.items()}
        plain: nn.Sequential = self.__dict__["_plain"]
        if plain._modules != layers:
            plain = self.__dict__["_plain"] = plain_module(layers)
            plain.training = self.training
        return plain

    @property
    def hf_device_map(self) -> dict[str, torch.device]:
        """The device of each layer, by name: an attribute that Hugging Face's trainers look for.

        Neither Accelerate nor Transformers' ``Trainer`` moves a model whose map has several
        entries, and the ``Trainer`` does not wrap it in :class:`nn.DataParallel`.
        """
        return {
            f"partitions.{j}.{name}": device
            for j, (layers, device) in enumerate(zip(self.partitions, self._devices))
            for name in layers._modules
        }

    def describe(self) -> Description:
        """Describe the partitions: their layers, sizes, devices and checkpoint modes.

        After a :func:`~torchgpipe.trace` also the times of a micro-batch, and the memory of the
        device. What a plan had predicted is beside it, as long as the settings are those of the
        plan.

        Returns:
            A table, to be printed, whose rows have the figures.
        """
        return self._stages.describe(self)

    def extra_repr(self) -> str:
        devices = [str(device) for device in self._devices]
        return f"devices={devices}, {super().extra_repr()}"

    def train(self, mode: bool = True) -> GPipe:
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
        """Change dtype or memory format, as :meth:`nn.Module.to` does.

        Raises:
            TypeError: a device is among the arguments.
        """
        first = args[0] if args else kwargs.get("device", kwargs.get("tensor"))
        if isinstance(first, torch.device | str | int | Tensor):
            raise moving_denied()
        return super().to(*args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # Here, since a parent does not call load_state_dict().
        rename(state_dict, prefix, self._prefixes)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict with the keys of the plain module, or of a wrapper with any balance."""
        versions = getattr(state_dict, "_metadata", None)
        if versions is not None:
            # The versions of the saved layers have keys, too, which cannot be renamed through a
            # parent. Torch keeps the versions as an attribute that types do not know.
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
        """Run the layers, micro-batch by micro-batch.

        Args:
            *args: the arguments of the first layer: any nested structure (tuples, lists, dicts,
                named tuples and whatever is registered with :mod:`torch.utils._pytree`) of tensors,
                all on ``devices[0]``, and other objects. Tensors have the same size in dimension 0,
                along which they are split into micro-batches. Each micro-batch gets whole: tensors
                that are marked by :class:`NoChunk` or have no dimension, and other objects.
            **kwargs: the same.

        Returns:
            The outputs of the last layer, on ``devices[-1]``: tensors of all micro-batches joined
            along dimension 0, and tensors without a dimension stacked to shape ``(m,)``, as are
            those that are marked by :class:`PerMicroBatch`.

        Raises:
            TypeError: the input, or what passes between partitions, holds tensors in something
                that PyTorch does not know as a container.
            ValueError: the input is on another device, or its tensors differ in their first size;
                the outputs of the micro-batches cannot be joined, as where an output's first size
                is not the same multiple of the rows of each micro-batch; or layers are sharded by
                FSDP2 while the devices are several.
            RuntimeError: a parameter or buffer was moved to another device; a
                :mod:`torch.func` transform or forward-mode differentiation is active; or a layer
                changed in place a tensor that every micro-batch gets whole.
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
