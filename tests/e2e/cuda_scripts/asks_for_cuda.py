"""Calls what scripts hard-code of CUDA, and prints for each what came of it."""

import json
import pickle
import sys
import tempfile

import torch
from torch import nn

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


@case
def guards():
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() >= 1
    assert torch.cuda.is_initialized()


@case
def initialises():
    torch.cuda.init()
    torch.cuda.set_device(0)
    torch.cuda.synchronize()
    assert torch.cuda.current_device() == 0


@case
def selects_devices():
    torch.cuda.set_device("cuda:1")
    assert torch.cuda.current_device() == 1
    with torch.cuda.device(3):
        assert torch.cuda.current_device() == 3
    assert torch.cuda.current_device() == 1
    torch.cuda.set_device(torch.device("cuda", 0))


@case
def names_devices():
    assert torch.device("cuda", 1).type == "cuda"
    assert torch.device(1) == torch.device("cuda:1")
    assert isinstance(torch.device("cuda"), torch.device)
    assert not isinstance("cuda", torch.device)
    assert pickle.loads(pickle.dumps(torch.device("cuda:1"))).index == 1


@case
def sends_tensors():
    x = torch.arange(3.0)
    for sent in (
        x.to("cuda"),
        x.to(torch.device("cuda:1")),
        x.to(0),
        x.to(device="cuda"),
        x.to("cuda", non_blocking=True),
        x.cuda(),
        x.cuda(1, non_blocking=True),
        x.cuda(device="cuda:0"),
    ):
        assert sent.tolist() == [0, 1, 2]
        assert sent.is_cuda
    assert x.to("cuda", torch.float64).dtype is x.to("cuda:0", dtype=torch.float64).dtype is torch.float64


@case
def tells_types():
    x = torch.zeros(2, device="cuda")
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.half().type() == "torch.cuda.HalfTensor"
    assert isinstance(x, torch.cuda.FloatTensor)
    assert x.type(torch.cuda.HalfTensor).dtype is torch.float16
    assert x.type("torch.cuda.DoubleTensor").dtype is torch.float64
    assert torch.cuda.FloatTensor([1.0, 2.0]).tolist() == [1, 2]


@case
def makes_tensors():
    for device in ("cuda", "cuda:1", 0, torch.device("cuda")):
        assert torch.zeros(2, device=device).is_cuda
        assert torch.tensor([1, 2], device=device).is_cuda
        assert torch.arange(2, device=device).is_cuda
        assert torch.randn_like(torch.ones(2), device=device).is_cuda
        assert torch.ones(2).new_zeros(3, device=device).is_cuda
    assert torch.empty(2, pin_memory=True).shape == (2,)
    assert torch.fft.fftfreq(4, device="cuda").shape == (4,)
    with torch.device("cuda"):
        assert torch.ones(2).is_cuda
    with torch.device("meta"):
        assert torch.ones(2).is_meta


@case
def makes_modules():
    model = nn.Linear(2, 2).cuda().to("cuda").to(torch.device("cuda", 0)).to(0)
    assert all(parameter.is_cuda for parameter in model.parameters())
    assert nn.Linear(2, 2, device="cuda:0").weight.is_cuda
    assert nn.DataParallel(model, device_ids=[0, 1])(torch.ones(1, 2)).shape == (1, 2)


@case
def sets_defaults():
    torch.set_default_device("cuda")
    torch.set_default_tensor_type(torch.cuda.FloatTensor)
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    assert torch.zeros(1).is_cuda


@case
def pins_memory():
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    x = torch.ones(2).pin_memory().cuda(non_blocking=True)
    for workers in (0, 2):
        loader = torch.utils.data.DataLoader(data, 4, False, num_workers=workers, pin_memory=True)
        x = x + torch.stack([batch.cuda(non_blocking=True) for (batch,) in loader]).sum()
    assert x.tolist() == [57, 57]


@case
def draws_numbers():
    torch.cuda.manual_seed_all(3)
    state = torch.cuda.get_rng_state()
    first = torch.randn(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.randn(4, device="cuda"))
    torch.cuda.manual_seed(3)
    assert torch.equal(first, torch.randn(4, device="cuda"))
    generator = torch.Generator(device="cuda").manual_seed(7)
    assert isinstance(generator, torch.Generator)
    assert torch.randperm(5, device="cuda", generator=generator).shape == (5,)
    assert len(torch.cuda.get_rng_state_all()) == torch.cuda.device_count()
    with torch.random.fork_rng(devices=[0]):
        torch.manual_seed(1)


@case
def measures_memory():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    held = torch.ones(30_000_000, device="cuda")
    assert torch.cuda.max_memory_allocated() - before > 100e6
    assert torch.cuda.memory_allocated() > held.nbytes
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] > held.nbytes
    del held
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() - before < 100e6
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total == torch.cuda.get_device_properties(0).total_memory


@case
def looks_at_devices():
    assert torch.cuda.is_bf16_supported()
    assert torch.cuda.get_device_name(0)
    assert torch.cuda.get_device_capability() == (8, 0)
    assert torch.cuda.nccl.version() >= (2, 10)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True


@case
def measures_time():
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.Stream()
    first.record()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() is stream
        last.record(stream)
    torch.cuda.current_stream().wait_stream(stream)
    last.synchronize()
    assert first.elapsed_time(last) >= 0
    with torch.cuda.nvtx.range("step"):
        torch.cuda.nvtx.range_push("inner")
        torch.cuda.nvtx.range_pop()
    torch.cuda.cudart().cudaProfilerStart()


@case
def trains_in_mixed_precision():
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    for dtype in (torch.float16, torch.bfloat16, None):
        before = model.weight.detach().clone()
        with torch.autocast("cuda", dtype=dtype):
            assert torch.is_autocast_enabled()
            out = model(torch.ones(2, 4, device="cuda"))
            assert out.dtype is torch.get_autocast_gpu_dtype() is (dtype or torch.float16)
        assert not torch.is_autocast_enabled()
        scaler.scale(out.sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert not torch.equal(before, model.weight)
    assert scaler.is_enabled()
    assert scaler.get_scale() == 2.0**10


@case
def uses_old_names_of_mixed_precision():
    assert torch.cuda.amp.GradScaler().is_enabled()
    with torch.cuda.amp.autocast():
        assert torch.mm(torch.ones(2, 2).cuda(), torch.ones(2, 2).cuda()).dtype is torch.float16


@case
def loads_files():
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save({"x": torch.ones(2)}, file.name)
        places = (None, "cuda:0", torch.device("cuda"), {"cpu": "cuda:1"}, lambda storage, _: storage.cuda(1))
        for place in places:
            assert torch.load(file.name, map_location=place)["x"].is_cuda


@case
def compiles_torchscript():
    @torch.jit.script
    def add(x):
        return x + torch.zeros(2) + torch.ones(2, device=x.device)

    assert add(torch.ones(2).cuda()).tolist() == [2, 2]


@case
def refuses_what_needs_a_gpu():
    assert torch.cuda.CUDAGraph | None  # as packages annotate
    said = outcome(torch.cuda.CUDAGraph)
    assert said.startswith("UsageError: this script uses torch.cuda.CUDAGraph, which needs a GPU")


def left_alone():
    """Functions of torch.cuda that are still PyTorch's own."""
    found = (getattr(torch.cuda, name, None) for name in torch.cuda.__all__)
    return sorted(f.__name__ for f in found if callable(f) and f.__module__.startswith("torch.cuda"))


def outcome(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


if __name__ == "__main__":
    report = {
        "cases": {name: outcome(function) for name, function in CASES.items()},
        "left alone": left_alone(),
        "argv": sys.argv,
        "first in path": sys.path[0],
        "main": sys.modules["__main__"].__file__,
    }
    print(json.dumps(report))
