"""Starts processes in all ways; each says whether it has a GPU."""

import multiprocessing

import torch


def on_cuda(index, is_available):
    print("child", index, torch.zeros(2, device="cuda").is_cuda, is_available(), flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(on_cuda, args=(torch.cuda.is_available,), nprocs=1)
    for number, method in enumerate(("fork", "forkserver"), start=1):
        arguments = (number, torch.cuda.is_available)
        process = multiprocessing.get_context(method).Process(target=on_cuda, args=arguments)
        process.start()
        process.join()
