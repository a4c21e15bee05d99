"""Not here: says so, with what to do."""

from smdistributed.horovod.not_here import names_not_here

names_not_here("horovod.torch")("elastic")
