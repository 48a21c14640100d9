"""What a machine lacks is reported before anything is measured: a GPU, a driver, a torch with CUDA, NCCL."""

from types import SimpleNamespace

import pytest

from lengthwise import catalog
from lengthwise.measure.operators import measure
from lengthwise.measure.operators.device import choose_device
from lengthwise.schema.errors import InputError


def lacking(*, cuda, gpus=0, nccl=True):
    """A torch of which only the answers are real that are asked before the first tensor."""
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(is_available=lambda: gpus > 0, device_count=lambda: gpus),
        distributed=SimpleNamespace(
            is_available=lambda: True, is_nccl_available=lambda: nccl, is_gloo_available=lambda: False
        ),
    )


@pytest.mark.parametrize(
    ("cuda", "report"),
    [
        (None, "was built without CUDA: install a build with it"),
        ("13.0", r"\(CUDA 13.0\) sees no GPU: look at nvidia-smi and the driver"),
    ],
    ids=["no CUDA", "no GPU or driver"],
)
def test_without_a_gpu_or_its_driver_the_remedy_is_named(cuda, report):
    with pytest.raises(InputError, match=f"needs an NVIDIA GPU and its driver; torch 2.13.0 {report}.*--device cpu"):
        choose_device(lacking(cuda=cuda), catalog.model("llama-3-8b"), "cuda", "auto", None)


def test_without_a_gpu_auto_takes_the_cpu():
    assert choose_device(lacking(cuda="13.0"), catalog.model("llama-3-8b"), "auto", "auto", 1).kind == "cpu"


@pytest.mark.parametrize(
    ("device", "gpus", "report"),
    [
        ("cuda", 1, "collectives over 2 GPUs were not measured: this machine has 1"),
        ("cuda", 2, "collectives were not measured: this torch has no nccl"),
        ("cpu", 0, "collectives were not measured: this torch has no gloo"),
    ],
)
def test_collectives_that_cannot_be_measured_are_left_out_and_named(device, gpus, report):
    torch = lacking(cuda="13.0", gpus=gpus, nccl=False)
    assert measure.measure_collectives(torch, device, 2, limit_s=1.0) == ([], report)
