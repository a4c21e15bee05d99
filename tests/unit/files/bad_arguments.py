"""Command lines that ask for what cannot be: the words, and what stderr says of them. The exit code is 2.

``BIG`` stands for 5,000 digits, ``DEEP`` for 100,000 brackets, ``ESC`` for an escape sequence, ``NL`` for a
line break. Files are those of `files.good_files`; ``fifo`` is a pipe that nobody writes to, ``folder`` a
folder, ``device`` one like /dev/full.
"""

__all__ = ["BAD_ARGUMENTS", "words_of"]

BIG, DEEP, ESC = "9" * 5000, "[" * 100_000, "\x1b[31m"

BAD_ARGUMENTS = (
    # How many ranks, hosts, seconds.
    ("run -n 99999999999 train.py", "--num-ranks is "),
    ("run -n 0 train.py", "--num-ranks is "),
    ("run -n BIG train.py", "--num-ranks is "),
    ("run -n two train.py", "--num-ranks is "),
    ("run --nnodes 99999999999 --name a train.py", "--nnodes is "),
    ("run --nnodes 2 --name a train.py", "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
    ("run --nnodes 2 --name a --rdzv-endpoint h:99999999 train.py", "--rdzv-endpoint is 'h:99999999'"),
    ("run --nnodes 2 --name a --rdzv-endpoint a:1:2 train.py", "--rdzv-endpoint is 'a:1:2'"),
    ("run --nnodes 2 --node-rank 5 --name a --rdzv-endpoint h:1 train.py", "--node-rank 5 is not in 0 to 1"),
    ("run --grace nan train.py", "--grace is "),
    ("run --grace -1 train.py", "--grace is "),
    ("run --max-restarts 99999999999999 train.py", "--max-restarts is "),
    # Degrees and plans for other ranks than are started.
    ("run -n 2 --set tensor_parallel_degree=3 train.py", "tensor(3)"),
    ("run -n 4 --set pipeline_parallel_degree=3 train.py", "pipeline(3)"),
    ("run -n 2 --resume --fresh train.py", "--resume continues a run, and --fresh begins one"),
    ("run -n 2 --name a --fresh train.py", "--name a names the run folder"),
    ("run -n 2 --resume train.py", "no run of train.py in runs has a checkpoint to resume from"),
    # Names.
    ("run --name ESC train.py", "run_name is '\\x1b[31m'"),
    ("run --name a/b train.py", "run_name is 'a/b'"),
    ("run --run-dir aNLb train.py", "the run folder is 'a\\nb/"),
    ("run aNLb.py", "the script is 'a\\nb.py'"),
    ("run nofile.py", "There is no script nofile.py"),
    ("run folder", "folder is a folder"),
    ("run fifo", "There is no script fifo"),
    ("ESC", "'\\x1b[31m' has a control character"),
    ("plan ESC", "'\\x1b[31m' has a control character"),
    ("show aNLb", "'a\\nb' has a control character"),
    ("catalogue ESC", "'\\x1b[31m' has a control character"),
    ("schedule ESC", "'\\x1b[31m' has a control character"),
    # Settings.
    ("run --dry-run --set timeout_s=NaN train.py", "--set timeout_s=NaN: it is nan"),
    ("run --dry-run --set microbatches=BIG train.py", "it has more than 30 digits"),
    ("run --dry-run --set microbatches=DEEP train.py", "it is nested more than 64 deep"),
    (
        "run --dry-run --set microbatchs=4 train.py",
        "microbatchs is not a setting. Did you mean microbatches?",
    ),
    ("run --dry-run --set microbatches train.py", "write it as KEY=VALUE"),
    ("run --set microbatches=-1 train.py", "microbatches is -1"),
    ("run --set microbatches=2 --set microbatches=4 train.py", "microbatches is given twice, with two"),
    ("run --plan gone.json train.py", "there is no such file"),
    ("run --json train.py", "--json is for --dry-run"),
    ("run --dry-run --set run_name=ESC train.py", "run_name is '\\x1b[31m'"),
    ('run --dry-run --set pipeline={"a":1,"a":2} train.py', "'a' is there twice"),
    ("run --dry-run --set memory_limit=1e999GiB train.py", "memory_limit is '1e999GiB'"),
    # Files where options want them.
    ("run --dry-run --config fifo train.py", "--config fifo cannot be read: it is a pipe"),
    ("run --dry-run --config /dev/zero train.py", "--config /dev/zero cannot be read: it is a device"),
    ("run --dry-run --config folder train.py", "--config folder cannot be read: Is a directory"),
    ("run --dry-run --config nothing train.py", "--config nothing: there is no such file"),
    ("run --dry-run --config plan.json train.py", "--config plan.json: "),
    ("run --dry-run --plan fifo train.py", "plan file fifo cannot be read: it is a pipe"),
    ("run --dry-run --plan settings.yaml train.py", "plan file settings.yaml is no JSON: line 1"),
    ("run --dry-run --mp-parameters fifo train.py", "fifo cannot be read: it is a pipe"),
    ("run --dry-run --mp-parameters partitions=BIG train.py", "it has more than 30 digits"),
    ('run --dry-run --mp-parameters {"partitions":NaN} train.py', "partitions is nan"),
    ('run --dry-run --mp-parameters {"partitions":2,"partitions":4} train.py', "'partitions' is there twice"),
    ('run --dry-run --mp-parameters {"a":DEEP train.py', "it is nested more than 64 deep"),
    # Plans.
    ("plan m.py:build -n 99999999999", "--num-ranks is "),
    ("plan m.py:build -n 2 -o device", "--output device cannot be written: it is a device"),
    ("plan m.py:build -n 2 -o fifo", "--output fifo cannot be written: it is a pipe"),
    ("plan m.py:build -n 2 -o folder", "--output folder cannot be written: it is a folder"),
    ("plan m.py:build -n 2 --profile /dev/zero", "profile /dev/zero cannot be read: it is a device"),
    ("plan m.py:build -n 2 --cluster fifo.yaml", "cluster file fifo.yaml cannot be read: it is a pipe"),
    ("plan m.py:build -n 2 --cluster p4d.24xlarge*99999999999", "'99999999999' in"),
    ("plan m.py:build -n 2 --cluster nothing", "there are no machines called 'nothing'"),
    ("plan m.py:build -n 2 --cluster p4d.24xlarge --dtype int3", "one of bfloat16, float16, float32"),
    ("show fifo", "plan file fifo cannot be read: it is a pipe"),
    ("show nothing.json", "plan file nothing.json cannot be read: No such file"),
    ("compare plan.json fifo", "plan file fifo cannot be read"),
    ("compare plan.json", "compare needs OTHER_PLAN"),
    ("explain folder", "folder holds neither plan.json nor metrics.jsonl"),
    ("report /dev/zero", "plan file /dev/zero cannot be read: it is a device"),
    ("report plan.json -o device", "the report cannot be written to device: it is a device"),
    ("show nowhere", "there is no run folder nowhere"),
    ("show folder", "metrics.jsonl holds no step"),
    ("runs /dev/zero", "there is no folder /dev/zero"),
    # Simulations and schedules.
    ("schedule 1f1b -n 99999999999", "--num-ranks is "),
    ("schedule 1f1b --microbatches 200000", "--microbatches is "),
    ("schedule 1f1b -n 1000 --microbatches 1000", "are 2000000 actions"),
    ("schedule 1f1b --active 99999999999", "--active is "),
    ("schedule interleaved_1f1b --stages-per-rank 99999999", "--stages-per-rank is "),
    # Searches.
    ("catalogue p4d.24xlarge -o device", "--output device cannot be written: it is a device"),
    (
        "catalogue p4d.24xlarge -o nowhere/x.yaml",
        "--output nowhere/x.yaml cannot be written: there is no folder",
    ),
    ("catalogue p4d.24xlarge*0", "'0' in 'p4d.24xlarge*0'"),
    ("catalogue BIG", "is not a kind of node and a number"),
    ("search gpt2-1.5b p4d.24xlarge --batch 99999999999", "batch is 99999999999"),
    ("search gpt2-1.5b p4d.24xlarge --batch 512 --dtype int3", "no rate for 'int3'"),
    (
        "search gpt2-1.5b p4d.24xlarge --batch 512 --pin tensor=999999999999",
        "no way to train has tensor=9999",
    ),
    ("search gpt2-1.5b p4d.24xlarge --batch 512 --pin tensor=BIG", "tensor is '999999999999...'"),
    ("search gpt2-1.5b p4d.24xlarge --batch 512 --pin x=1", "'x' is no option of a topology"),
    ("search gpt2-1.5b p4d.24xlarge*100000 --batch 512 --runtime x", "'x' is no runtime"),
    ("search gpt2-1.5b p4d.24xlarge+p4d.24xlarge*100000*2 --batch 512", "is not a kind of node"),
    ("search nothing p4d.24xlarge --batch 512", "there is no architecture 'nothing'"),
    ("search plan.json p4d.24xlarge --batch 512", "plan.json: model_type is None"),
    ("search nothing.json p4d.24xlarge --batch 512", "nothing.json cannot be read: No such file"),
    ("search gpt2-1.5b p4d.24xlarge --batch 512 --tokens 1e9 --days nan", "--days is nan"),
    # What measures.
    ("trace m.py:build --stages 99999999999", "--stages is "),
    ("profile m.py:build -o device", "device cannot be written: it is a device"),
    ("profile m.py:build -o nowhere/x.json", "nowhere/x.json cannot be written: there is no folder"),
    ("profile m.py:build --config fifo", "--config fifo cannot be read: it is a pipe"),
    ("probe fifo", "fifo cannot be written: it is a pipe"),
    ("probe prices.json --cluster device", "device cannot be written: it is a device"),
    # Checkpoints.
    ("ckpt ls fifo", "there is no folder fifo"),
    ("ckpt verify /dev/zero", "there is no folder /dev/zero"),
    ("ckpt gc folder --keep 0", "folder has no checkpoint"),
    ("ckpt export folder --to x --max-shard-size 1e999GiB", "'1e999GiB' is not a size"),
    ("ckpt export folder --to x --max-shard-size BIG", "is not a size"),
    ("ckpt export folder --to device", "device is there already, and is no folder"),
    ("ckpt import fifo --to x", "fifo does not say what it is"),
    ("ckpt import nothing --to x", "there is no nothing"),
)


def words_of(line: str) -> list[str]:
    """The words of a command line."""
    stand_ins = {"BIG": BIG, "DEEP": DEEP, "ESC": ESC, "NL": "\n"}
    words = line.split()
    for name, text in stand_ins.items():
        words = [word.replace(name, text) for word in words]
    return words
