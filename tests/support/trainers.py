"""Trainers on virtual accelerators."""


def known(monkeypatch, arguments, device):
    """Have a Trainer know a device, as it knows the first GPU.

    Args:
        monkeypatch: the fixture.
        arguments: the Trainer's arguments, which were made with ``use_cpu=True``.
        device: the device.
    """
    from accelerate.state import AcceleratorState, PartialState
    from transformers import TrainingArguments

    place = property(lambda x: (x._setup_devices, device)[1])
    monkeypatch.setattr(TrainingArguments, "device", place)
    assert arguments.device == device
    monkeypatch.setitem(PartialState._shared_state, "device", device)
    AcceleratorState._shared_state.clear()
