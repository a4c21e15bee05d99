"""Calls what scripts hard-code of CUDA, and prints for each what came of it."""

import copy
import inspect
import json
import pickle
import sys
import tempfile
import threading

import torch
from torch import nn
from torch.profiler import ProfilerActivity

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
def has_a_current_device_for_each_thread():
    def in_thread():
        seen.append(torch.cuda.current_device())
        torch.cuda.set_device(1)
        seen.append(torch.cuda.current_device())

    seen = []
    torch.cuda.set_device(2)
    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert seen == [0, 1]
    assert torch.cuda.current_device() == 2
    torch.cuda.set_device(0)


@case
def names_devices():
    assert torch.device("cuda", 1).type == "cuda"
    assert torch.device(1) == torch.device(device=1) == torch.device("cuda:1")
    assert type(torch.device("cuda")) is torch.device
    assert not isinstance("cuda", torch.device)
    assert pickle.loads(pickle.dumps(torch.device("cuda:1"))).index == 1
    assert pickle.loads(pickle.dumps(torch.device)) is copy.deepcopy(torch.device) is torch.device
    assert torch.device.__module__ == "torch"


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
def keeps_what_it_copies_to_the_host():
    """As from a GPU; kept weights were those that are trained on, and went on with them."""
    model = nn.Linear(2, 1).cuda()
    before = model.weight.tolist()
    kept = {name: value.cpu() for name, value in model.state_dict().items()}
    host = torch.device("cpu")
    copies = [kept["weight"], *(model.weight.to(each) for each in ("cpu", host, torch.device("cpu")))]
    copies += [model.weight.to("cpu", torch.float32, True, False), model.weight.to(device="cpu")]
    with torch.no_grad():
        model.weight += 1
    assert all(copy.tolist() == before for copy in copies)
    model.load_state_dict(kept)
    assert model.weight.tolist() == before
    sum(copy.sum() for copy in copies[1:]).backward()
    assert model.weight.grad.tolist() == [[5, 5]]
    # Where it is already there is none, nor where a module moves as a whole.
    x = torch.zeros(2, device="cuda")
    assert x.to("cuda") is x.to(x.device) is x.cuda() is x.to(torch.float32) is x
    made_here = torch.zeros(3, requires_grad=True)
    assert made_here.to("cpu") is made_here.cpu() is made_here
    weight = model.weight
    assert model.cpu().weight is model.to("cpu").weight is weight
    whole = torch.compile(lambda x: x.cpu() + x.to("cpu"), fullgraph=True, backend="aot_eager")
    assert whole(x + 1).tolist() == [2, 2]


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
    assert torch.ones(2).new(3, device="cuda").is_cuda
    assert torch.empty(2, pin_memory=True).shape == (2,)
    assert torch.UntypedStorage(4, device="cuda").nbytes() == 4
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
    for general in (torch.Stream("cuda"), torch.Stream(device=torch.device("cuda", 0), priority=-1)):
        with torch.cuda.stream(general):
            general.record_event(torch.Event("cuda", enable_timing=True)).synchronize()
    # Without a device, options or not, they are those of the accelerator.
    assert torch.Stream(priority=-1).priority == -1
    for kind in (torch.Event, torch.cuda.Event):
        first, last = kind(enable_timing=True), kind(enable_timing=True)
        first.record()
        torch.Stream().record_event(last)
        assert first.elapsed_time(last) >= 0
    for made in (torch.Stream(), torch.Stream("cuda"), torch.cuda.Stream(1), torch.cuda.current_stream()):
        assert isinstance(made, torch.Stream)
        assert made.device.type == "cuda"
    assert isinstance(torch.Event(), torch.Event)
    assert isinstance(torch.cuda.Event(), torch.Event)
    assert isinstance(torch.Stream("cpu"), torch.Stream)
    assert not isinstance(torch.Stream(), torch.Event)
    assert torch.cuda.Stream() != torch.cuda.Stream()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    with torch.cuda.nvtx.range("step"):
        torch.cuda.nvtx.range_push("inner")
        torch.cuda.nvtx.range_pop()
    torch.cuda.cudart().cudaProfilerStart()


@case
def has_a_current_stream_for_each_device():
    torch.cuda.set_device(0)
    of_0, of_1 = torch.cuda.Stream(0), torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(of_0):
        with torch.cuda.stream(of_1):  # which makes its device the current one
            assert torch.cuda.current_device() == 1
            assert torch.cuda.current_stream() is of_1
            assert torch.cuda.current_stream(0) is of_0
            assert torch.cuda.current_stream("cuda:2") == torch.cuda.default_stream(2)
            assert torch.cuda.current_stream(2).device == torch.device("cuda", 2)
        assert torch.cuda.current_device() == 0
        assert torch.cuda.current_stream() is of_0
        assert torch.cuda.current_stream(1) == torch.cuda.default_stream(1)
        with torch.cuda.device(1):
            assert torch.cuda.current_stream() == torch.cuda.default_stream(1)
    assert torch.cuda.current_stream() == torch.cuda.default_stream(0)
    assert torch.cuda.set_stream(of_1) is None
    assert (torch.cuda.current_device(), torch.cuda.current_stream()) == (1, of_1)
    torch.cuda.set_stream(torch.cuda.default_stream(1))
    torch.cuda.set_device(0)
    assert torch.cuda.Stream(stream_id=7, device_index=3, device_type=1).device_index == 3


@case
def leaves_streams_as_it_found_them():
    torch.cuda.set_device(0)
    first, second, before = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()
    again = torch.cuda.stream(first)
    with first, second, first, again, again:  # a stream twice, and a context twice
        assert torch.cuda.current_stream() is first
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() is first
            torch.cuda.set_stream(second)
        assert torch.cuda.current_stream() is second
    assert torch.cuda.current_stream() is before

    def entered(stream):
        with stream:
            yield torch.cuda.current_stream()

    with first:
        outer = entered(second)
        assert next(outer) is second
        with first:
            assert next(outer, None) is None
            assert torch.cuda.current_stream() is first
        assert torch.cuda.current_stream() is second
    assert torch.cuda.current_stream() is before

    elsewhere = entered(first)
    thread = threading.Thread(target=lambda: next(elsewhere))
    thread.start()
    thread.join()
    with first:
        assert next(elsewhere, None) is None
    assert torch.cuda.current_stream() == before
    assert outcome(lambda: first.__exit__(None, None, None)).startswith("RuntimeError: a stream is left")

    with first:
        seen = []
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
    assert seen == [torch.cuda.default_stream()]


@case
def profiles():
    x = torch.ones(2, 2).cuda()
    for activities in ([ProfilerActivity.CPU, ProfilerActivity.CUDA], [{ProfilerActivity.CUDA: []}], None):
        with torch.profiler.profile(activities=activities) as profile:
            x @ x
        assert "aten::mm" in profile.key_averages().table(sort_by="cuda_time_total")
    for options in ({"use_cuda": True}, {"use_device": "cuda"}):
        with torch.autograd.profiler.profile(**options) as profile:
            x @ x
        assert any(event.key == "aten::mm" for event in profile.key_averages())
    with torch.cuda.profiler.profile(), torch.autograd.profiler.emit_nvtx(record_shapes=True):
        x @ x


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
def sets_mixed_precision_by_hand():
    x = torch.ones(2, 2, device="cuda")
    torch.set_autocast_enabled("cuda", True)
    assert (x @ x).dtype is torch.float16
    torch.set_autocast_gpu_dtype(torch.bfloat16)
    assert (x @ x).dtype is torch.get_autocast_dtype("cuda") is torch.bfloat16
    torch.set_autocast_enabled(False)
    assert (x @ x).dtype is torch.float32
    assert not torch.is_autocast_enabled("cuda")
    assert torch.get_autocast_gpu_dtype() is torch.bfloat16
    torch.set_autocast_dtype("cuda", torch.float16)
    with torch.autocast("cuda", torch.bfloat16):
        with torch.autocast("cuda"):
            assert (x @ x).dtype is torch.bfloat16
        with torch.autocast(x.device.type, enabled=False):
            assert not torch.is_autocast_enabled()
            assert (x @ x).dtype is torch.float32
        assert (x @ x).dtype is torch.bfloat16
    with torch.autocast("cuda"):
        assert (x @ x).dtype is torch.float16
    with torch.autocast("cpu"):
        assert (x @ x).dtype is torch.bfloat16


@case
def steps_as_in_a_graph():
    for make in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
        weight = nn.Parameter(torch.ones(2, device="cuda"))
        optimizer = make([weight], lr=0.1, capturable=True)
        weight.sum().backward()
        optimizer.step()
        assert (weight < 1).all()


@case
def compiles():
    """What is compiled is compiled whole, and compiles no worse where it says nothing of CUDA."""

    def places(x):
        x = x.to("cuda") + torch.arange(x.shape[0], device=x.device)
        x = x + torch.ones(3, device="cuda") + torch.ones(3, device=torch.device("cpu")).cuda()
        torch.cuda.synchronize()
        return x.to(torch.device(0)) if torch.cuda.is_available() else x

    def mixed(x):
        with torch.autocast("cuda", torch.bfloat16):
            product = x[None] @ x[:, None]
        return product if torch.is_autocast_enabled() else product.to(torch.get_autocast_gpu_dtype())

    whole = {"fullgraph": True, "backend": "aot_eager"}
    assert torch.compile(places, **whole)(torch.ones(3)).tolist() == [3, 4, 5]
    x = torch.ones(3, requires_grad=True)
    product = torch.compile(mixed, **whole)(x)
    assert product.dtype is torch.float16
    product.backward()
    assert x.grad.tolist() == [2, 2, 2]
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.compile(mixed, **whole)(torch.ones(3)).dtype is torch.bfloat16
    assert torch.get_autocast_gpu_dtype() is torch.float16


@case
def pickles():
    replaced = list(stand_ins())
    assert {torch.zeros, torch.load, torch.Tensor.to, nn.Module.to, torch.cuda.is_available} <= {*replaced}
    unlike = [f for f in replaced if pickle.loads(pickle.dumps(f)) is not f]
    assert not unlike, unlike


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
def imports_what_pytorch_had_once():
    import torch._six
    from torch._six import container_abcs, inf, int_classes, string_classes

    assert float("inf") == inf == torch._six.inf
    assert isinstance("text", string_classes)
    assert int_classes is int
    assert isinstance({}, container_abcs.Mapping)


@case
def refuses_what_needs_a_gpu():
    assert torch.cuda.CUDAGraph | None  # as packages annotate
    said = outcome(torch.cuda.CUDAGraph)
    assert said.startswith("UsageError: this script uses torch.cuda.CUDAGraph, which needs a GPU")


def stand_ins():
    """Functions and classes with public names that are not PyTorch's own."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "torch" and "._" not in name:
            owners = [module, *(found for found in vars(module).values() if inspect.isclass(found))]
            for owner in owners:
                found = [found for key, found in vars(owner).items() if not key.startswith("_")]
                found = [each.__func__ if isinstance(each, staticmethod) else each for each in found]
                yield from (f for f in found if is_stand_in(f))


def is_stand_in(found):
    made = found.__new__ if inspect.isclass(found) else found
    path = made.__code__.co_filename if inspect.isfunction(made) else ""
    return "cpu_mode" in path or str(getattr(found, "__module__", "")).startswith("shardwright.")


def left_alone():
    """Functions of torch.cuda that are still PyTorch's own."""
    found = (getattr(torch.cuda, name, None) for name in torch.cuda.__all__)
    own = (f for f in found if callable(f) and not is_stand_in(f))
    return sorted(f.__name__ for f in own if f.__module__.startswith("torch.cuda"))


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
