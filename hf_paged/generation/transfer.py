"""Reads from devices, as few as can be: each waits for all that the device has been given to do."""

import torch


def on_host(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Tensors on the CPU; integers of one device are read at once: a read waits for the device."""
    together: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor is not None and not tensor.is_cpu and not tensor.is_floating_point():
            together.setdefault(tensor.device, []).append(place)
    here = [None if tensor is None or not tensor.is_cpu else tensor for tensor in tensors]
    for places in together.values():
        chosen = [tensors[place] for place in places]
        flat = torch.cat([tensor.flatten().long() for tensor in chosen if tensor is not None]).cpu()
        sizes = [tensor.numel() for tensor in chosen if tensor is not None]
        for place, numbers in zip(places, flat.split(sizes), strict=True):
            here[place] = numbers.view(tensors[place].shape)  # type: ignore[union-attr]
    pairs = zip(tensors, here, strict=True)
    return [own if tensor is None or own is not None else tensor.cpu() for tensor, own in pairs]
