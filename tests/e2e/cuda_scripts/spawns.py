"""Starts processes in all ways; each says whether it has a GPU."""

import multiprocessing

import torch


def on_cuda(index):
    print("child", index, torch.zeros(2, device="cuda").is_cuda, flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(on_cuda, nprocs=1)
    for number, method in enumerate(("fork", "forkserver"), start=1):
        process = multiprocessing.get_context(method).Process(target=on_cuda, args=(number,))
        process.start()
        process.join()
