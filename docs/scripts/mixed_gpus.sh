#!/usr/bin/env bash
# Consumer GPUs of two kinds over Ethernet, say two RTX 4090 in one machine and two
# RTX 3090 in another.
#
#   ./mixed_gpus.sh profile rtx4090                      on the first machine
#   ./mixed_gpus.sh profile rtx3090                      on the second; copy its rtx3090.json to the first
#   ./mixed_gpus.sh solve                                on the first; copy its plan.json to the second
#   HOST0=192.168.1.10 HOST=0 ./mixed_gpus.sh train      on the first
#   HOST0=192.168.1.10 HOST=1 ./mixed_gpus.sh train      on the second
#
# Change the number of GPUs in each machine and the rates of the links, below.
set -euo pipefail

model=${MODEL:-model.py}

case ${1:-} in
profile)
    plan profile "$model" --batch-size 8 --dtype bfloat16 -o "${2:?which kind of GPU?}.json"
    ;;
solve)
    # Ranks fill the machines in order: 0 and 1 are the 4090s. Inside a machine PCIe, between them 2.5 Gbit/s.
    plan solve --profile rtx4090=rtx4090.json,rtx3090=rtx3090.json --kinds rtx4090=2,rtx3090=2 \
        --topology 2x2 --bandwidth pcie4,2.5Gbps
    plan compare
    ;;
train)
    export NCCL_SOCKET_IFNAME=${INTERFACE:-eth0} GLOO_SOCKET_IFNAME=${INTERFACE:-eth0}
    # The order of a set of texts is then the same in all workers.
    export PYTHONHASHSEED=0
    torchrun --nnodes 2 --node-rank "${HOST:?}" --nproc-per-node 2 \
        --master-addr "${HOST0:?}" --master-port 29500 \
        -m planner train "$model" --plan plan.json --epochs 10 \
        --checkpoint-every 500 --resume
    ;;
*)
    echo "mixed_gpus.sh: no step '${1:-}'; there are profile, solve and train" >&2
    exit 2
    ;;
esac
