#!/usr/bin/env bash
# Several hosts: start this on every host, with the same model file and plan.json in
# the current folder.
#
#   HOST0=10.0.0.1 HOSTS=2 HOST=0 GPUS=4 ./several_hosts.sh model.py     on the first host
#   HOST0=10.0.0.1 HOSTS=2 HOST=1 GPUS=4 ./several_hosts.sh model.py     on the second
#
# HOST0 is the first host's address, HOST this host's number, and GPUS the workers
# that the plan has on each host. If a host has several interfaces, say which one
# joins the hosts: INTERFACE=eth0.
set -euo pipefail

model=${1:?"usage: several_hosts.sh model.py"}
if [ -n "${INTERFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi

# The order of a set of texts is then the same in all workers.
export PYTHONHASHSEED=0

torchrun --nnodes "${HOSTS:?}" --node-rank "${HOST:?}" --nproc-per-node "${GPUS:?}" \
    --master-addr "${HOST0:?}" --master-port "${PORT:-29500}" \
    -m planner train "$model" --plan plan.json --epochs "${EPOCHS:-3}" \
    --checkpoint-every "${CHECKPOINT_EVERY:-500}" --resume
