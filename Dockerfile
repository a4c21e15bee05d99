# A machine that trains: docker build -t shardwright . && docker run --rm --shm-size 2g shardwright
#
#   --build-arg PIP_ARGS='--extra-index-url ...'                      a build of torch: pytorch.org names the index of each
#   docker run --gpus all ...                                         with a build for GPUs
#   docker run ... shardwright shardwright run -n 2 /data/train.py    a script of yours
ARG PYTHON=3.11
FROM python:${PYTHON}-slim

ARG PIP_ARGS=
WORKDIR /opt/shardwright
COPY constraints.txt pyproject.toml setup.py README.md LICENSE ./
COPY src src
COPY examples examples
RUN pip install --no-cache-dir $PIP_ARGS -c constraints.txt torch \
 && pip install --no-cache-dir -c constraints.txt '.[torch,demo,report]' \
 && useradd --create-home trainer

USER trainer
WORKDIR /home/trainer
CMD ["shardwright", "run", "-n", "2", "/opt/shardwright/examples/train_gpt.py"]
