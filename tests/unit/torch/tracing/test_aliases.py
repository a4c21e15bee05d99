import torch

from shardwright.runtime.traced import Change
from shardwright.torch.tracing.trace_data import Step
from shardwright.torch.tracing.traced_call import follow_changes, view_of


def step(*, reads=(), changes=()):
    return Step(func=None, node=0, reads=reads, changes=changes)


def change(position, before, after, tensor):
    return Change(position, before, after, view_of(tensor))


def test_a_tensor_covers_its_views():
    base = torch.zeros(2, 3, 4)
    assert view_of(base).covers(view_of(base[:, 1]))
    assert view_of(base.transpose(0, 2)).covers(view_of(base[1]))
    assert not view_of(base[0]).covers(view_of(base[1]))
    assert not view_of(base[:, :, ::2]).covers(view_of(base[0, 0, :1])), "it has holes"


def test_dims_are_ordered_from_the_widest_stride_to_the_narrowest():
    base = torch.zeros(2, 3, 4)
    assert view_of(base).order == (0, 1, 2)
    assert view_of(base.permute(2, 0, 1)).order == (1, 2, 0)
    assert view_of(base[:, :1].expand(2, 3, 4)).order is None


def test_changes_that_nobody_reads_are_dropped():
    base = torch.zeros(2, 3)
    steps = [
        step(changes=(change(0, 1, 3, base[0]), change(None, 0, 4, base), change(None, 2, 5, base[1]))),
        step(reads=((0, 4),)),
    ]
    follow_changes(steps, results=[])
    assert [c.after for c in steps[0].changes] == [3, 4]
    assert [b.before for b in steps[0].bases] == [0]
    assert set(steps[0].inputs) == {0, 1}


def test_an_alias_that_is_changed_twice_is_followed_from_the_first_change():
    base = torch.zeros(2, 3)
    steps = [
        step(reads=((0, 1),), changes=(change(0, 1, 3, base[0]), change(None, 0, 4, base))),
        step(reads=((0, 3),), changes=(change(0, 3, 5, base[0]), change(None, 4, 6, base))),
    ]
    follow_changes(steps, results=[6])
    assert [c.after for c in steps[0].changes] == [3, 4]
